"""The lock of an image's packages: all packages with their versions and hashes, resolved by uv at the deploy.

The client resolves, because it has the user's files, indexes and logins, and can show uv's message at once. The lock
contains the packages that a worker itself imports. So a contradiction with that is an error of the deploy, too.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gpufn_core.errors import InvalidSpec
from gpufn_core.find_uv import find_uv
from gpufn_core.spec.image_spec import MACHINES

WORKER_NEEDS = ("cloudpickle>=3.1", "msgspec>=0.20,<1")
_TIMEOUT_S = 600.0
_LONGEST_MESSAGE = 2000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CUDA_RUNTIME = re.compile(rb"^nvidia-cuda-runtime(?:-cu(\d{1,3})|==(\d{1,3})\.)", re.MULTILINE)
_PLAIN = ("--no-header", "--no-annotate", "--no-progress", "--color=never")


def this_machine() -> str:
    """Return the kind of machine to lock for: this one if nodes may be of its kind."""
    machine = platform.machine()
    return machine if sys.platform == "linux" and machine in MACHINES else MACHINES[0]


def this_python() -> str:
    return "{}.{}".format(*sys.version_info)


def export_uv_lock(file: Path) -> str:
    """Return the requirements in a uv.lock, without the project itself. Raises InvalidSpec."""
    command = ("export", "--frozen", "--no-dev", "--no-emit-project", "--format=requirements-txt", *_PLAIN)
    return _run([*command, "--project", os.fspath(file.parent)], f"cannot read {file.name}")


def lock(
    requirements: Sequence[str],
    files: Iterable[Path] = (),
    fixed: str = "",
    *,
    python: str,
    machine: str,
    builds: bool = False,
    on_progress: Callable[[str], None] = lambda progress: None,
) -> bytes:
    """Resolve `requirements`, the requirement `files` and the worker's needs. `fixed` is a lock that stays unchanged.
    `builds` allows packages without a wheel. Raises InvalidSpec with uv's message."""
    on_progress("resolving packages")
    with tempfile.TemporaryDirectory(prefix="gpufn-lock-") as folder:
        own, constraints = Path(folder, "requirements.in"), Path(folder, "constraints.txt")
        own.write_text("\n".join([*requirements, *WORKER_NEEDS, ""]))
        constraints.write_text(fixed)
        resolved = _run(
            [
                *("pip", "compile", "--generate-hashes", *_PLAIN),
                *("--python-version", python, "--python-platform", f"{machine}-manylinux_2_28"),
                *(() if builds else ("--only-binary", ":all:")),
                *(("--constraint", os.fspath(constraints)) if fixed else ()),
                *map(os.fspath, (own, *files)),
            ],
            "the packages cannot be resolved",
        )
    return _joined(fixed, resolved).encode()


def cuda_version(lock: bytes) -> int:
    """Return the major version of the CUDA runtime among the packages; 0 without one.

    >>> cuda_version(b"nvidia-cuda-runtime-cu12==12.8.90 ...")
    12
    >>> cuda_version(b"nvidia-cuda-runtime==13.0.96 ..."), cuda_version(b"numpy==2.4.0 ...")
    (13, 0)
    """
    found = _CUDA_RUNTIME.search(lock)
    return 0 if found is None else int(found[1] or found[2])


def _joined(fixed: str, resolved: str) -> str:
    """Return both locks as one. A package that is in both stays as in `fixed`.

    >>> _joined("a==1 --hash=sha256:0\\n", "A==1 \\\\\\n    --hash=sha256:0\\nb==2\\n")
    'a==1 --hash=sha256:0\\nb==2\\n'
    """
    if not fixed:
        return resolved
    known = {_key(line) for line in fixed.splitlines() if _NAME.match(line)}
    kept, lines = True, [fixed.rstrip("\n")]
    for line in resolved.splitlines():
        if _NAME.match(line):
            kept = _key(line) not in known
        if kept:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _key(line: str) -> str:
    match = _NAME.match(line)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def _run(arguments: Sequence[str], failure: str) -> str:
    uv = find_uv()
    if uv is None:
        raise InvalidSpec("image: there is no uv here, which locks the packages: run `pip install uv`")
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    try:
        done = subprocess.run(  # noqa: S603
            [uv, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise InvalidSpec(f"image: {failure}: uv has not ended after {_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise InvalidSpec(f"image: cannot run {uv}: {error.strerror}") from error
    if done.returncode != 0:
        advice = "\nTo allow that, write pip_install(..., builds=True)." if "--no-build" in done.stderr else ""
        raise InvalidSpec(f"image: {failure}: {uv_message(done.stderr)}{advice}")
    return done.stdout


def uv_message(output: str) -> str:
    """Return uv's message in the output, without its warnings.

    >>> uv_message("warning: a\\n  x No solution found:\\n  `-> there is no b\\n")
    'x No solution found:\\n  `-> there is no b'
    """
    lines = [line for line in output.splitlines() if not line.startswith("warning:")]
    return "\n".join(lines).strip()[-_LONGEST_MESSAGE:] or "uv gives no reason"
