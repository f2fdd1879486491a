"""The output of a process, in a file of bounded size whose end can be read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

_MAX_BYTES: Final = 64 << 20
_LAST_LINES: Final = 30
_LAST_BYTES: Final = 8192


class OutputFile:
    """`file` is for the process. It is read by its descriptor, because the process may replace the file at its path."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.file: BinaryIO = path.open("a+b")  # append mode, so that writes after a truncation start at the beginning
        self._last_size = 0

    def check(self) -> bool:
        """Return whether the process has written since the last call. Empty the file if it is too large."""
        size = self._size()
        has_grown, self._last_size = size != self._last_size, size
        if size > _MAX_BYTES:
            os.ftruncate(self.file.fileno(), 0)
            self._last_size = 0
        return has_grown

    def last_lines(self) -> str:
        end = os.pread(self.file.fileno(), _LAST_BYTES, max(0, self._size() - _LAST_BYTES))
        return "\n".join(end.decode(errors="replace").splitlines()[-_LAST_LINES:])

    def close(self) -> None:
        self.file.close()

    def _size(self) -> int:
        return os.fstat(self.file.fileno()).st_size
