"""The Python interpreters of this node: the agent's own, the interpreters on PATH, and the interpreters that uv has
installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from gpufn_core.errors import ArtifactUnavailable

_ASK = "import json, sys; print(json.dumps([*sys.version_info[:2], sys.executable, sys.base_prefix]))"
_TIMEOUT_S = 20.0
_VERSIONS = tuple(f"3.{minor}" for minor in range(11, 31))


class Interpreter(NamedTuple):
    executable: str
    prefix: str


def find_interpreter(version: str, path: str) -> Interpreter:
    """Return an interpreter of this version, such as 3.12. `path` is a list of folders, as in PATH. Raises
    ArtifactUnavailable. Runs programs, so it blocks."""
    for candidate in _candidates(version, path):
        if (found := _ask(candidate, version)) is not None:
            return found
    raise ArtifactUnavailable(
        f"This node has no Python {version}: install it there (uv python install {version}), or set another version."
    )


class InstalledVersions:
    """The versions of Python that this node has. Each program is run once: a stand-in of pyenv, for example, may not
    start."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._runs: dict[str, bool] = {}  # by program

    def find(self) -> tuple[str, ...]:
        """Return the versions, such as 3.12. Runs programs, so it blocks."""
        return tuple(version for version in _VERSIONS if self._has(version))

    def _has(self, version: str) -> bool:
        for candidate in _candidates(version, self._path):
            if candidate not in self._runs:
                self._runs[candidate] = _ask(candidate, version) is not None
            if self._runs[candidate]:
                return True
        return False


def _candidates(version: str, path: str) -> Iterator[str]:
    if version == "{}.{}".format(*sys.version_info):
        yield getattr(sys, "_base_executable", sys.executable)
    for folder in filter(os.path.isabs, path.split(os.pathsep)):
        if os.access(candidate := os.path.join(folder, f"python{version}"), os.X_OK):
            yield candidate
    of_uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local/share/uv/python")
    yield from map(os.fspath, sorted(of_uv.glob(f"cpython-{version}.*/bin/python{version}"), reverse=True))


def _ask(candidate: str, version: str) -> Interpreter | None:
    try:
        done = subprocess.run(  # noqa: S603
            [candidate, "-I", "-S", "-c", _ASK], capture_output=True, timeout=_TIMEOUT_S, check=True, env={}
        )
        major, minor, executable, prefix = msgspec.json.decode(done.stdout, type=tuple[int, int, str, str])
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None  # such as pyenv's stand-ins
    return Interpreter(executable, prefix) if f"{major}.{minor}" == version else None
