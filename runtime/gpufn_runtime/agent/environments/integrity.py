"""Verification of an environment: each installed package has a RECORD with the digests of its files."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from pathlib import Path


def damage(environment: Path) -> str:
    """Describe the first file that is missing or changed; "" if there is none. Blocks."""
    if not os.access(environment / "bin" / "python", os.X_OK):
        return "its interpreter is gone"
    for record in sorted(environment.glob("lib/python*/site-packages/*.dist-info/RECORD")):
        packages = record.parent.parent
        with record.open(newline="") as file:
            for row in csv.reader(file):
                name, digest = (*row, "", "")[:2]
                is_verifiable = digest.startswith("sha256=") and not name.endswith(".pyc")  # bytecode is compiled anew
                if is_verifiable and not _has_digest(packages / name, digest):
                    return f"{name} is missing or changed"
    return ""


def _has_digest(path: Path, expected: str) -> bool:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == expected.removeprefix("sha256=").rstrip("=")
