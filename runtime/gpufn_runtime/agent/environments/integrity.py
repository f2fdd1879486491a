"""Verification of an environment: each installed package has a RECORD with the digests of its files.

A build may have made any file, so only regular files inside the environment are read, without following links.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import stat
from pathlib import Path

_LARGEST_RECORD = 64 << 20
_LARGEST_FILE = 16 << 30


def damage(environment: Path) -> str:
    """Describe the first file that is missing or changed; "" if there is none. Blocks."""
    if not os.access(environment / "bin" / "python", os.X_OK):
        return "its interpreter is gone"
    for record in sorted(environment.glob("lib/python*/site-packages/*.dist-info/RECORD")):
        packages = record.parent.parent
        try:
            with _open(environment, record, _LARGEST_RECORD) as file:
                rows = list(csv.reader(io.StringIO(file.read(_LARGEST_RECORD).decode(), newline="")))
        except (OSError, ValueError, csv.Error):
            return f"{record.parent.name}/RECORD is not readable"
        for row in rows:
            name, digest = (*row, "", "")[:2]
            is_verifiable = digest.startswith("sha256=") and not name.endswith(".pyc")  # bytecode is compiled anew
            if is_verifiable and not _has_digest(environment, packages / name, digest):
                return f"{name} is missing or changed"
    return ""


def _open(environment: Path, path: Path, largest: int) -> io.BufferedReader:
    """Open a regular file inside the environment. Raises OSError, ValueError."""
    path = Path(os.path.normpath(path))  # scripts have names such as ../../../bin/pip
    if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(environment)):
        raise ValueError("outside the environment")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_size > largest:
        file.close()
        raise ValueError("not a regular file, or too large")
    return file


def _has_digest(environment: Path, path: Path, expected: str) -> bool:
    try:
        with _open(environment, path, _LARGEST_FILE) as file:
            digest = hashlib.file_digest(file, "sha256").digest()
    except (OSError, ValueError):
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == expected.removeprefix("sha256=").rstrip("=")
