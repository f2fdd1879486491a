"""The most memory that successful builds of each model held on this node, in a file. It only improves estimates."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from gpufn_core.domain.devices.engine import Build, model_digest

_MOST: Final = 1000  # models; the oldest are forgotten


class MemoryHistory:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes: dict[str, int] = {}
        with contextlib.suppress(OSError, msgspec.DecodeError):
            self._bytes = msgspec.json.decode(path.read_bytes(), type=dict[str, int])

    def get(self, build: Build) -> int | None:
        return self._bytes.get(_key(build))

    def add(self, build: Build, held_bytes: int) -> None:
        """Record the memory that a build used. The largest amount remains, because a build may find some of its
        engines."""
        key = _key(build)
        self._bytes[key] = max(held_bytes, self._bytes.pop(key, 0))
        for oldest in list(self._bytes)[:-_MOST]:
            del self._bytes[oldest]
        part = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(self._bytes))
            part.replace(self._path)
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _key(build: Build) -> str:
    return f"{model_digest(build.model.files)} {build.model.precision} {build.device}"
