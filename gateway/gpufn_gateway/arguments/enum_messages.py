"""What an enum somewhere inside a JSON Schema allows, for the message of who gave something else. Pure.

Schemas are the deployer's: all alternatives of a step are walked together, each node once, so that references that fan
out or go in circles cost no more than the schema is long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

_STEP = re.compile(r"\[(?:\d+|\.\.\.)\]|[^.\[\]]+")
_MOST = 10
_LONGEST = 500


def told_values(root: Mapping[str, Any], path: str) -> str:
    """
    >>> told_values({"properties": {"size": {"enum": ["s", "m", None]}}}, "size")
    '"s", "m", null'

    Empty when there are none at this path, or they are too long to be read.
    """
    try:
        values = [msgspec.json.encode(value).decode() for value in islice(_values_at(root, path), _MOST + 1)]
    except (TypeError, ValueError, KeyError, AttributeError):  # not a schema as ours are
        return ""
    told = ", ".join([*values[:_MOST], *(["..."] if len(values) > _MOST else [])])
    return told if len(told) <= _LONGEST else ""


def _values_at(root: Mapping[str, Any], path: str) -> Iterator[Any]:
    nodes = _alternatives(root, [root])
    for step in _STEP.findall(path):
        nodes = _alternatives(root, [below for node in nodes for below in _below(node, step)])
    for node in nodes:
        yield from node.get("enum", ())
        if "const" in node:
            yield node["const"]


def _alternatives(root: Mapping[str, Any], nodes: Iterable[Any]) -> list[Mapping[str, Any]]:
    """The nodes, what they refer to, and the members of unions."""
    found: dict[int, Mapping[str, Any]] = {}
    waiting = list(nodes)
    for node in waiting:  # which grows meanwhile
        if isinstance(node, Mapping) and id(node) not in found:
            found[id(node)] = node
            waiting += [*node.get("anyOf", ()), *node.get("oneOf", ())]
            if "$ref" in node:
                waiting.append(_referred(root, node["$ref"]))
    return list(found.values())


def _referred(root: Mapping[str, Any], reference: str) -> Any:
    node: Any = root
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


def _below(node: Mapping[str, Any], step: str) -> Iterator[Any]:
    if step == "[...]":
        yield node.get("additionalProperties")
    elif step.startswith("["):
        heads = node.get("prefixItems", ())
        index = int(step[1:-1])
        yield heads[index] if index < len(heads) else node.get("items")
    else:
        yield node.get("properties", {}).get(step)
