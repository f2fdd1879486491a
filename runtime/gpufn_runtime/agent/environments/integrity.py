"""Verification of an environment: each installed package has a RECORD with the digests of its files.

A build may have made any file, so only regular files inside the environment are read, without following links.
Several packages may install one file, such as opencv-python and opencv-python-headless: then it has the digest of one.
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
    expected: dict[str, tuple[str, set[str]]] = {}  # path: its name in the first record, and its digests
    for record in sorted(environment.glob("lib/python*/site-packages/*.dist-info/RECORD")):
        packages = record.parent.parent
        try:
            with _open(environment, record, _LARGEST_RECORD) as file:
                rows = list(csv.reader(io.StringIO(file.read(_LARGEST_RECORD).decode(), newline="")))
        except (OSError, ValueError, csv.Error):
            return f"{record.parent.name}/RECORD is not readable"
        for row in rows:
            name, digest = (*row, "", "")[:2]
            is_verifiable = digest.startswith("sha256=") and not name.endswith(".pyc")  # bytecode is compiled again
            if is_verifiable:
                _, digests = expected.setdefault(os.path.normpath(packages / name), (name, set()))
                digests.add(digest.removeprefix("sha256=").rstrip("="))
    for path, (name, digests) in expected.items():
        if _digest(environment, Path(path)) not in digests:
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


def _digest(environment: Path, path: Path) -> str:
    """Return the digest as a RECORD writes it; "" for a file that may not be read."""
    try:
        with _open(environment, path, _LARGEST_FILE) as file:
            digest = hashlib.file_digest(file, "sha256").digest()
    except (OSError, ValueError):
        return ""
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
