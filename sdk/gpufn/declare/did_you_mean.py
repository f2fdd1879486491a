"""What other SDKs call our methods, for who types them from habit. Pure."""

from __future__ import annotations

OF_FUNCTIONS = {
    "apply_async": "spawn(...) submits it",
    "delay": "spawn(...) submits it",
    "for_each": "map(...) calls it for each",
    "local": "a plain call, without .local, runs here",
    "remote_gen": "stream(...) has the items of a generator",
    "spawn_map": "map(...) calls it for each",
    "submit": "spawn(...) submits it",
}
OF_CALLS = {
    "done": "status() tells how it stands",
    "get": "result(timeout=...) waits for it",
    "wait": "result(timeout=...) waits for it",
}


def not_there(thing: object, name: str, words: dict[str, str]) -> AttributeError:
    """Python's own, with what was meant. It asks nothing of `thing`, which may be half made."""
    meant = f"; {words[name]}" if name in words else ""
    return AttributeError(f"{type(thing).__name__!r} object has no attribute {name!r}{meant}", name=name, obj=thing)
