"""The program uv: the client locks packages with it, and nodes make environments with it."""

from __future__ import annotations

import os
import shutil


def find_uv() -> str | None:
    """Return the path of uv: of the package `uv`, or of the machine."""
    try:
        import uv  # noqa: PLC0415  (an optional package)

        return os.fspath(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        return shutil.which("uv")
