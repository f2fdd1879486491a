"""What programs that the agent starts are given, built from nothing: what our own process was given, credentials first
of all, stays here, but for where libraries are. A machine may have its driver's where only LD_LIBRARY_PATH tells, and a
process reads that when it starts: a function's `env` comes too late for one that is forked from a template."""

from __future__ import annotations

import functools
import math
import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path

import gpufn
import gpufn_core
import gpufn_platform
import gpufn_runtime
from gpufn_core.spec.function_spec import FunctionSpec

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Each of these libraries starts a thread per core otherwise, in every worker.
_THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def worker_environment(spec: FunctionSpec, scratch: Path, gpus: tuple[str, ...]) -> dict[str, str]:
    """`gpus` are the uuids of the leased devices; without one the process sees none."""
    return {**_base(scratch), **container_environment(spec, gpus)}


def container_environment(spec: FunctionSpec, gpus: tuple[str, ...]) -> dict[str, str]:
    """What a worker in a container has besides its image's own."""
    return {**import_environment(spec.resources.cpu, spec.env), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def import_environment(cpu: float, env: Mapping[str, str]) -> dict[str, str]:
    """What the modules of a function with this `env` read when they are imported."""
    return {**dict.fromkeys(_THREADS, str(max(1, math.ceil(cpu)))), **env}


def template_environment(scratch: Path, env: Mapping[str, str]) -> dict[str, str]:
    """One thread, so that importing starts none, and no GPU: a template must not touch what a fork cannot share. `env`
    is that of the functions whose workers are forked from it."""
    return {**_base(scratch), **import_environment(1, env), "CUDA_VISIBLE_DEVICES": ""}


def driver_environment() -> dict[str, str]:
    """What the driver's own programs have."""
    return {"PATH": os.environ.get("PATH", os.defpath), **_libraries()}


def _libraries() -> dict[str, str]:
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if os.environ.get(name)}


def _base(scratch: Path) -> dict[str, str]:
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{_PATH}",
        "HOME": os.fspath(scratch),
        "TMPDIR": os.fspath(scratch),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        # Importing onnxruntime (1.29 and later) starts a thread that reports to its maker: nobody has asked for that,
        # and a template with a thread cannot be forked from.
        "ORT_DISABLE_TELEMETRY": "1",
        **_libraries(),
    }
    if roots := _import_roots():
        environment["PYTHONPATH"] = os.pathsep.join(roots)
    return environment


def worker_packages() -> list[str]:
    """The folders of the packages of gpufn that a worker imports."""
    return [path for package in (gpufn_core, gpufn, gpufn_platform, gpufn_runtime) for path in package.__path__]


@functools.cache
def _import_roots() -> tuple[str, ...]:
    """The folders that a fresh interpreter lacks to import gpufn: none when it is installed."""
    installed = {os.path.realpath(path) for path in [*site.getsitepackages(), site.getusersitepackages()]}
    roots: dict[str, None] = {}
    for path in worker_packages():
        root = os.path.dirname(os.path.realpath(path))
        if root not in installed:
            roots[root] = None
    return tuple(roots)
