"""Hints for users who type the method names of other SDKs. Pure."""

from __future__ import annotations

FUNCTION_HINTS = {
    "apply_async": "spawn(...) submits a call",
    "delay": "spawn(...) submits a call",
    "for_each": "map(...) calls the function for each item",
    "local": "a plain call, without .local, runs in this process",
    "remote_gen": "stream(...) yields the items of a generator",
    "spawn_map": "map(...) calls the function for each item",
    "submit": "spawn(...) submits a call",
}
CALL_HINTS = {
    "done": "status() returns the state of the call",
    "get": "result(timeout=...) waits for the result",
    "wait": "result(timeout=...) waits for the result",
}


def attribute_error(obj: object, name: str, hints: dict[str, str]) -> AttributeError:
    """Return Python's own AttributeError plus a hint. Reads no attribute of `obj`, whose `__init__` may still run."""
    hint = f"; {hints[name]}" if name in hints else ""
    return AttributeError(f"{type(obj).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=obj)
