"""Packages that read and convert models. They are optional: a laptop needs only the packages of its own models."""

from __future__ import annotations

import importlib
from typing import Any

from gpufn_core.errors import InvalidSpec


def required(module: str, install: str) -> Any:
    """Import a module. Raises InvalidSpec with the packages to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidSpec(f"{module.partition('.')[0]} is not installed here: pip install {install}") from error
