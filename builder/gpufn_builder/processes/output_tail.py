"""What a process prints: in a file whose end is kept, however much it prints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Final

_MOST_BYTES: Final = 64 << 20
_LAST_LINES: Final = 30
_LAST_BYTES: Final = 8192


class Printed:
    """`file` is for the process. It is read here by its descriptor: what is at its path later may be something else."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.file: BinaryIO = path.open("a+b")  # appended to, so that what comes after `shorten` begins a new file

    def shorten(self) -> None:
        """Called now and then while the process runs."""
        if self._size() > _MOST_BYTES:
            os.ftruncate(self.file.fileno(), 0)

    def last_lines(self) -> str:
        end = os.pread(self.file.fileno(), _LAST_BYTES, max(0, self._size() - _LAST_BYTES))
        return "\n".join(end.decode(errors="replace").splitlines()[-_LAST_LINES:])

    def close(self) -> None:
        self.file.close()

    def _size(self) -> int:
        return os.fstat(self.file.fileno()).st_size
