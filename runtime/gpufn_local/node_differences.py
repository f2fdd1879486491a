"""Differences between nodes that decide where functions with locked packages run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

_COMPARED: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    "machines": lambda node: str(node.get("machine", "")),
    "versions of Python": lambda node: " ".join(node.get("pythons", ())),
    "drivers": lambda node: str(node.get("facts", {}).get("driver", "")),
    "versions of CUDA": lambda node: str(node.get("facts", {}).get("cuda", "")),
}
_MAX_NAMES: Final = 3


def differences(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Return a text for each fact in which the nodes differ. `nodes` is the response of `GET /v1/nodes`.

    >>> differences([{"node": "a", "machine": "x86_64"}, {"node": "b", "machine": "aarch64"}, {"node": "c"}])
    ['machines differ: aarch64 (b), x86_64 (a), unknown (c)']
    """
    found = []
    for what, read in _COMPARED.items():
        by_value: dict[str, list[str]] = {}
        for node in nodes:
            by_value.setdefault(read(node), []).append(str(node.get("node", "")))
        if len(by_value) > 1:
            values = sorted(by_value.items(), key=lambda each: (not each[0], each[0]))
            texts = [f"{value or 'unknown'} ({_named(on)})" for value, on in values]
            found.append(f"{what} differ: {', '.join(texts)}")
    return found


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(sorted(names)[:_MAX_NAMES]) + more
