"""Environments of the programs that the agent starts, built from scratch so that credentials do not leak.

Only LD_LIBRARY_PATH is inherited: on some machines it locates the NVIDIA driver.

A program that will enter a sandbox starts without a function's `env`, and sets it inside. Variables such as PYTHONPATH,
LD_AUDIT and OPENSSL_CONF make an interpreter load code, which would run before the sandbox is entered.
"""

from __future__ import annotations

import functools
import math
import os
import site
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import gpufn
import gpufn_core
import gpufn_platform
import gpufn_runtime
from gpufn_core.domain.devices.device import NO_MPS
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.isolation import Isolation, Network
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.launchers.containers.sandbox import Limits
from gpufn_runtime.agent.mps.base import Mounts

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Otherwise each of these libraries starts a thread per core, in every worker.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

_COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def worker_environment(
    spec: FunctionSpec,
    scratch: Path,
    gpus: tuple[str, ...],
    *,
    is_sandboxed: bool,
    python: Environment | None = None,
) -> dict[str, str]:
    """Return the environment of a worker process. `gpus` are the leased devices' uuids; no uuids hide all GPUs. The
    worker runs in the environment `python`; None: in the agent's."""
    variables = import_environment(spec.resources.cpu, {} if is_sandboxed else spec.env)
    return {**_base(scratch, python), **_with_gpus(variables, gpus)}


def container_environment(spec: FunctionSpec, gpus: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of a worker in a container, in addition to the image's."""
    return _with_gpus(import_environment(spec.resources.cpu, spec.env), gpus)


def _with_gpus(environment: dict[str, str], gpus: tuple[str, ...]) -> dict[str, str]:
    return {**environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def import_environment(cpu: float, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that modules may read on import: thread counts and the function's `env`."""
    return {**dict.fromkeys(_THREAD_VARIABLES, str(max(1, math.ceil(cpu)))), **env}


def container_limits(
    spec: FunctionSpec, memory_bytes: int, gpus: tuple[str, ...] = (), mps: Mounts | None = None
) -> Limits:
    """Return the limits of a container for the function. A standby's limits must equal the limits of its future
    worker."""
    env = frozenset(import_environment(spec.resources.cpu, spec.env).items())
    egress = spec.egress or spec.network in (Network.EGRESS, Network.FULL)
    has_gvisor = spec.isolation is Isolation.GVISOR
    return Limits(memory_bytes, spec.resources.cpu, egress, has_gvisor, gpus, mps, env)


def template_environment(scratch: Path, *, sees_gpus: bool, python: Environment | None = None) -> dict[str, str]:
    """Return a template's environment: one thread, so that imports start none. The template of GPU functions sees all
    GPUs, because libraries choose their GPU build on import. torch then counts them with NVML: with CUDA, no worker
    could be forked."""
    gpus = {_COUNT_BY_NVML: "1"} if sees_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    return {**_base(scratch, python), **import_environment(1, {}), **NO_MPS, **gpus}


def preload_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a template sets inside its sandbox before it imports modules: the `env` of its
    functions."""
    return {name: value for name, value in env.items() if name != _COUNT_BY_NVML}


def proof_environment(gpu: str) -> dict[str, str]:
    """Return the environment of a process that proves CUDA on one GPU."""
    return {**_base(Path(tempfile.gettempdir())), **NO_MPS, "CUDA_VISIBLE_DEVICES": gpu}


def driver_environment() -> dict[str, str]:
    """Return the environment of NVIDIA's programs."""
    return {"PATH": os.environ.get("PATH", os.defpath), **_libraries()}


def _libraries() -> dict[str, str]:
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if os.environ.get(name)}


def _base(scratch: Path, python: Environment | None = None) -> dict[str, str]:
    environment = {
        "PATH": f"{Path(python.python if python else sys.executable).parent}:{_PATH}",
        "HOME": os.fspath(scratch),
        "TMPDIR": os.fspath(scratch),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        # Importing onnxruntime (1.29 and later) starts a telemetry thread. Users did not consent to telemetry, and a
        # template with a second thread cannot be forked.
        "ORT_DISABLE_TELEMETRY": "1",
        **_libraries(),
    }
    if python is not None:
        environment |= python.variables
    else:
        environment |= import_roots()
    return environment


def import_roots() -> dict[str, str]:
    """Return the variables with which another process of the agent's interpreter imports gpufn."""
    return {"PYTHONPATH": os.pathsep.join(roots)} if (roots := _import_roots()) else {}


def worker_packages() -> list[str]:
    """Return the folders of gpufn's packages that a worker imports."""
    return [path for package in (gpufn_core, gpufn, gpufn_platform, gpufn_runtime) for path in package.__path__]


@functools.cache
def _import_roots() -> tuple[str, ...]:
    """Return the folders that must be on PYTHONPATH to import gpufn; empty if gpufn is installed."""
    installed = {os.path.realpath(path) for path in [*site.getsitepackages(), site.getusersitepackages()]}
    roots = dict.fromkeys(os.path.dirname(os.path.realpath(path)) for path in worker_packages())
    return tuple(root for root in roots if root not in installed)
