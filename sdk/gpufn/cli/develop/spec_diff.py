"""Differences between a deployed function and a local one: options, arguments, files. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.image_spec import FILES_FOLDER

# `signature_changes` and the code have these; `modules` follows from the code.
_NO_OPTIONS: Final = frozenset({"name", "entry", "methods", "modules", "is_class"})
_GROUPS: Final = ("scaling.", "resources.")  # not part of the options of @gpu_function


class OptionChange(msgspec.Struct, frozen=True):
    """An option of `@gpu_function`, with null for a value that is not set. The values of `env` may be secrets, so they
    are not named."""

    option: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.option}  {_text(self.before)} → {_text(self.after)}"


def option_changes(before: FunctionSpec, after: FunctionSpec, *, knows_env: bool = True) -> list[OptionChange]:
    """Return the options that differ. Without `knows_env`, the values of `env` in `before` are unknown."""
    old, new = _options(before), _options(after)
    return [
        _without_value(OptionChange(name, old.get(name), new.get(name)))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and (knows_env or not name.startswith("env."))
    ]


def _without_value(change: OptionChange) -> OptionChange:
    if not change.option.startswith("env."):
        return change
    before = None if change.before is None else "set"
    after = None if change.after is None else "set" if before is None else "set to another value"
    return OptionChange(change.option, before, after)


def _options(spec: FunctionSpec) -> dict[str, Any]:
    plain = {name: value for name, value in msgspec.to_builtins(spec).items() if name not in _NO_OPTIONS}
    return {_option_name(path): value for path, value in _flat(plain)}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _flat(each, f"{path}.{name}" if path else name)
    elif value not in ({}, []):
        yield path, value


def _option_name(path: str) -> str:
    """Return the name of an option for the path of its field.

    >>> [_option_name(path) for path in ("scaling.idle_timeout_s", "resources.memory_bytes", "batch.max_size")]
    ['idle_timeout', 'memory', 'batch.max_size']
    """
    for group in _GROUPS:
        path = path.removeprefix(group)
    return path if path.startswith("env.") else re.sub(r"_(s|bytes)$", "", path)


def _text(value: Any) -> str:
    return "-" if value is None else msgspec.json.encode(value).decode()


def file_changes(before: Mapping[str, bytes], after: Mapping[str, bytes], deployed: str) -> Iterator[str]:
    """Yield the lines of a unified diff of two sets of files. `deployed` names the first one.

    The lock of an image has one name in both, and no hashes: its packages are compared by version.
    """
    before, after = _with_short_locks(before), _with_short_locks(after)
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        try:
            before_lines, after_lines = ([] if data is None else data.decode().splitlines() for data in (old, new))
        except UnicodeDecodeError:
            yield f"Binary files {name} ({deployed}) and {name} differ"
            continue
        old_path = "/dev/null" if old is None else f"{name} ({deployed})"
        new_path = "/dev/null" if new is None else name
        yield from difflib.unified_diff(before_lines, after_lines, old_path, new_path, lineterm="")


def _with_short_locks(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files, with the locks of images as one file without hashes."""
    short: dict[str, bytes] = {}
    for name, data in sorted(files.items()):
        if name.startswith(f"{FILES_FOLDER}/") and b"--hash=sha256:" in data:
            lines = (line.removesuffix(b" \\") for line in data.splitlines() if b"--hash=sha256:" not in line)
            lock = f"{FILES_FOLDER}/lock"
            short[lock] = short.get(lock, b"") + b"".join(line + b"\n" for line in lines)
        else:
            short[name] = data
    return short
