"""Files that only their owner may read.

The platform sets no umask for them: workers and MPS daemons would inherit it, and their files have other readers.
"""

from __future__ import annotations

import os
from pathlib import Path


def create_private(path: str, flags: int) -> int:
    """Open a file; a new one has mode 0600. It is an `opener` for `open`."""
    return os.open(path, flags, 0o600)


def write_private(path: Path, data: bytes) -> None:
    """Write a file; a new one has mode 0600. Raises OSError."""
    with open(path, "wb", opener=create_private) as file:
        file.write(data)


def replace_private(path: Path, data: bytes) -> None:
    """Write a file with mode 0600 atomically, also in case of a power failure. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
