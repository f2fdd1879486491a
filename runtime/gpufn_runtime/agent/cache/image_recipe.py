"""Build file of a container image. Pure.

1. the base image; 2. the worker's requirements; 3. apt packages; 4. Python packages; 5. the user's files;
6. the user's commands

Steps that change rarely come first, because Docker rebuilds from the first changed step. Each step is a JSON array
(exec form), so no shell parses user input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from gpufn_core.spec.image_spec import ImageSpec

_PIP = ("python3", "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "--root-user-action=ignore")
_APT = 'apt-get update -q && apt-get install -q -y --no-install-recommends "$@" && rm -rf /var/lib/apt/lists/*'
_LOCK = "/gpufn/lock.txt"


@dataclass(frozen=True)
class Recipe:
    """Build file of an image. `files` are the digests of the files in the build context."""

    text: str
    files: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Digest of everything that determines the image. The base image counts by its name only."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def recipe(spec: ImageSpec, *, bases: str, worker_needs: Sequence[str]) -> Recipe:
    """Return the recipe of an image. `bases` is the base image's name, with `{python}` for the Python version;
    `worker_needs` are pip requirements.

    >>> spec = ImageSpec(python="3.12", pip=("torch",))
    >>> print(recipe(spec, bases="python:{python}-slim", worker_needs=["msgspec"]).text, end="")
    FROM python:3.12-slim
    ENV PIP_BREAK_SYSTEM_PACKAGES=1 DEBIAN_FRONTEND=noninteractive
    RUN ["python3", "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", \
"--root-user-action=ignore", "msgspec"]
    RUN ["python3", "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", \
"--root-user-action=ignore", "msgspec", "torch"]
    """
    lines = [
        f"FROM {spec.base or bases.format(python=spec.python)}",
        "ENV PIP_BREAK_SYSTEM_PACKAGES=1 DEBIAN_FRONTEND=noninteractive",
        _run(*_PIP, *worker_needs),
    ]
    if spec.apt:
        lines.append(_run("sh", "-c", _APT, "apt", *spec.apt))
    # pip gets the worker's requirements again, so a package that conflicts with them fails here, with pip's message.
    if lock := spec.locked or spec.lock:
        lines.append(_copy(lock, _LOCK))
        lines.append(_run(*_PIP, "-r", _LOCK))
    if spec.pip and not spec.locked:
        lines.append(_run(*_PIP, *worker_needs, *spec.pip))
    lines += [_copy(file.digest, file.path) for file in spec.files]
    lines += [_run("sh", "-c", command) for command in spec.commands]
    return Recipe("\n".join(lines) + "\n", spec.file_digests)


def _run(*words: str) -> str:
    return f"RUN {json.dumps(words)}"


def _copy(digest: str, path: str) -> str:
    return f"COPY {json.dumps([f'files/{digest}', path])}"
