"""The values that an enum inside a JSON Schema allows, for error messages. Pure.

Schemas come from the deployer, so they are not trusted. Each step of a path visits a node of the schema once at most.
So references that fan out or form cycles cost no more than the size of the schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

_STEP = re.compile(r"\[(?:\d+|\.\.\.)\]|[^.\[\]]+")
_MAX_VALUES = 10
_MAX_LENGTH = 500


def allowed_values(root: Mapping[str, Any], path: str) -> str:
    """Return the allowed values at `path`; empty if there are none or the text would be too long.

    >>> allowed_values({"properties": {"size": {"enum": ["s", "m", None]}}}, "size")
    '"s", "m", null'
    """
    try:
        values = [msgspec.json.encode(value).decode() for value in islice(_values_at(root, path), _MAX_VALUES + 1)]
    except (TypeError, ValueError, KeyError, AttributeError):  # not a valid schema
        return ""
    text = ", ".join([*values[:_MAX_VALUES], *(["..."] if len(values) > _MAX_VALUES else [])])
    return text if len(text) <= _MAX_LENGTH else ""


def _values_at(root: Mapping[str, Any], path: str) -> Iterator[Any]:
    nodes = _alternatives(root, [root])
    for step in _STEP.findall(path):
        nodes = _alternatives(root, [child for node in nodes for child in _children(node, step)])
    for node in nodes:
        yield from node.get("enum", ())
        if "const" in node:
            yield node["const"]


def _alternatives(root: Mapping[str, Any], nodes: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Return the nodes, the targets of their references, and the members of unions."""
    reachable: dict[int, Mapping[str, Any]] = {}
    queue = list(nodes)
    for node in queue:  # the list grows during the loop
        if isinstance(node, Mapping) and id(node) not in reachable:
            reachable[id(node)] = node
            queue += [*node.get("anyOf", ()), *node.get("oneOf", ())]
            if "$ref" in node:
                queue.append(_resolve_ref(root, node["$ref"]))
    return list(reachable.values())


def _resolve_ref(root: Mapping[str, Any], reference: str) -> Any:
    node: Any = root
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


def _children(node: Mapping[str, Any], step: str) -> Iterator[Any]:
    if step == "[...]":  # msgspec's name for a value of a dict
        yield node.get("additionalProperties")
    elif step.startswith("["):
        prefix_items = node.get("prefixItems", ())
        index = int(step[1:-1])
        yield prefix_items[index] if index < len(prefix_items) else node.get("items")
    else:
        yield node.get("properties", {}).get(step)
