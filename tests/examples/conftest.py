"""Each example is deployed to a running platform and called as its README describes."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from tests.conftest import ROOT, Platform, missing


def deploy(platform: Platform, example: str | Path, *needs: str) -> None:
    """Return an example by its name, or a copy of one."""
    _need(str(example), *needs)
    platform.gpufn("deploy", ROOT / "examples" / example / "app.py")


def made(copy: Path, example: str, script: str, *needs: str) -> Path:
    """Return a copy of an example in which `script` has written the models."""
    _need(example, *needs)
    shutil.copytree(ROOT / "examples" / example, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.onnx"))
    subprocess.run([sys.executable, copy / script], check=True, capture_output=True)
    return copy


def run(platform: Platform, program: str | Path, *arguments: str | Path) -> str:
    """Run a program of an example, such as "chat/ask.py", as a user does. Returns what it prints."""
    return subprocess.run(
        [sys.executable, ROOT / "examples" / program, *arguments],
        env=os.environ | {"GPUFN_URL": platform.url},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@contextlib.contextmanager
def imported(folder: Path, name: str) -> Iterator[ModuleType]:
    """Import a module from an example's folder, for the duration of the context."""
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        for module in set(sys.modules) - before:
            file = getattr(sys.modules[module], "__file__", None)
            if file and Path(file).is_relative_to(folder):
                del sys.modules[module]


def _need(example: str, *modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            missing(f"{module} is not installed: see examples/{example}/README.md")
