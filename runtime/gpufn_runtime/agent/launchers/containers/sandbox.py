"""Docker settings that confine a worker's container: limits, mounts and environment. Pure.

/gpufn/worker     worker folder, read-only: config, the runner's socket, output, `bundle/`, `engines/<key>/` and
                  `weights/<digest>/`
/gpufn/shared_bodies    large bodies of the worker's calls, in shared memory, writable
/gpufn/lib        our packages, read-only
/gpufn/mps        if the worker shares its GPU by MPS: the MPS daemon's pipes; /dev/shm may be the daemon's too
/tmp              home and scratch space, in memory that counts as the worker's
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gpufn_core.domain.devices.device import NO_MPS
from gpufn_core.protocol.launch import CONTAINED, IN_CONTAINER, MountedVolume, WorkerConfig
from gpufn_core.spec.weights_spec import WeightsSpec
from gpufn_runtime.agent.launchers.containers.gpu_access import CDI_KIND, GpuDriver
from gpufn_runtime.agent.launchers.containers.runtimes import GVISOR
from gpufn_runtime.agent.mps.base import Mounts
from gpufn_runtime.agent.mps.client import PIPE_IN_CONTAINER

_MAX_PIDS = 1024  # processes and threads
_MIN_TMP_BYTES = 64 << 20
_LOG_CONFIG = {"type": "json-file", "config": {"max-size": "64k", "max-file": "1"}}  # for output before a worker starts
# A worker that requests a tenth of a core gets the kernel's default weight of a process, 1,024. With less weight, its
# imports took ten times as long on a busy machine as the imports of a worker process.
_SHARES_PER_CORE = 10_240
_MAX_SHARES = 262_144

LIB = f"{IN_CONTAINER}/lib"
WORKER = f"{IN_CONTAINER}/worker"
SHARED_BODIES = f"{IN_CONTAINER}/shared_bodies"
SCRATCH = "/tmp"  # noqa: S108  (inside the container)

# Variables of a function's `env` that are not set before the container has a worker: they locate Python or select GPUs.
_EXCLUDED_VARIABLES = ("PATH", "PYTHONHOME", "PYTHONPATH")
_NVIDIA_PREFIX = "NVIDIA_"


@dataclass(frozen=True)
class Limits:
    """Properties that are fixed when a container is created: a standby serves only workers with equal limits. `gpus`
    are uuids. `env` holds the variables that modules may read on import, which happens before there is a worker."""

    memory_bytes: int
    cpu: float
    egress: bool = False
    has_gvisor: bool = False
    gpus: tuple[str, ...] = ()
    mps: Mounts | None = None
    env: frozenset[tuple[str, str]] = field(default=frozenset(), repr=False)


@dataclass(frozen=True)
class Sandbox:
    """Arguments for docker-py's `create_container` (`container_config`) and `create_host_config` (`host_config`)."""

    container_config: Mapping[str, Any]
    host_config: Mapping[str, Any]


def sandbox(
    limits: Limits,
    *,
    uid: int,
    folder: Path,
    shared_bodies: Path,
    packages: Iterable[str],
    modules: Iterable[str],
    gpu_driver: GpuDriver,
    egress_network: str = "bridge",
) -> Sandbox:
    """Return a container's settings. `packages` are our package folders on this host; `modules` are imported early."""
    mounts = [
        _mount(folder, WORKER),
        _mount(shared_bodies, SHARED_BODIES, writable=True),
        *(_mount(package, f"{LIB}/{os.path.basename(package)}") for package in packages),
    ]
    if limits.mps is not None:
        mounts.append(_mount(limits.mps.pipe, PIPE_IN_CONTAINER, writable=True))
        if limits.mps.memory:
            mounts.append(_mount(limits.mps.memory, "/dev/shm", writable=True))  # noqa: S108
    tmp_bytes = max(limits.memory_bytes // 2, _MIN_TMP_BYTES)
    return Sandbox(
        container_config={
            "entrypoint": ["python3", "-P", "-m", "gpufn_runtime.worker", CONTAINED, *sorted(modules)],
            "command": [],
            "user": f"{uid}:{uid}",
            "working_dir": SCRATCH,
            "hostname": "worker",
            "environment": {
                "PYTHONUNBUFFERED": "1",
                "HOME": SCRATCH,
                "TMPDIR": SCRATCH,
                "USER": "worker",  # the uid has no passwd entry
                "LOGNAME": "worker",
                "LANG": "C.UTF-8",
                **_import_environment(limits.env),
                "PYTHONPATH": LIB,
                # Imports come before the worker's own environment, and may initialize CUDA.
                **(NO_MPS if limits.mps is None else {"CUDA_MPS_PIPE_DIRECTORY": PIPE_IN_CONTAINER}),
                # Without this, an image made for GPUs requests all of them.
                "NVIDIA_VISIBLE_DEVICES": ",".join(limits.gpus) or "void",
            },
        },
        host_config={
            "runtime": GVISOR if limits.has_gvisor else None,  # None: Docker's default
            "network_mode": egress_network if limits.egress else "none",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "read_only": True,
            "tmpfs": {SCRATCH: f"rw,nosuid,nodev,size={tmp_bytes},mode=1777"},
            "shm_size": tmp_bytes,
            "mounts": mounts,
            "pids_limit": _MAX_PIDS,
            "mem_limit": limits.memory_bytes,
            "memswap_limit": limits.memory_bytes,  # memory and swap together: no swap
            # A CPU weight, not reserved cores.
            "cpu_shares": min(max(2, int(limits.cpu * _SHARES_PER_CORE)), _MAX_SHARES),
            "ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            "ipc_mode": "private",
            "log_config": _LOG_CONFIG,
            "device_requests": _gpu_requests(limits.gpus, gpu_driver),
        },
    )


def config_in_container(config: WorkerConfig) -> WorkerConfig:
    """Return the config with the paths inside the container, and without limits, which the container enforces."""
    return msgspec.structs.replace(
        config,
        socket=f"{WORKER}/s",
        secrets_socket=f"{WORKER}/{os.path.basename(config.secrets_socket)}" if config.secrets_socket else "",
        bundle_dir=f"{WORKER}/bundle" if config.bundle_dir else "",
        engines={
            parameter: tuple(f"{WORKER}/engines/{os.path.basename(folder)}" for folder in folders)
            for parameter, folders in config.engines.items()
        },
        weights=tuple(
            f"{WORKER}/{weights_name(spec)}" + (f"/{os.path.basename(path)}" if spec.is_file else "")
            for spec, path in zip(config.spec.weights, config.weights, strict=True)
        ),
        volumes=tuple(
            msgspec.structs.replace(volume, path=f"{WORKER}/{volume_name(volume)}") for volume in config.volumes
        ),
        shared_bodies=SHARED_BODIES,
        supervisor_fifo="",
        memory_limit_bytes=None,
        open_files=None,
        cgroup_procs=(),
    )


def weights_name(spec: WeightsSpec) -> str:
    """Return the name of the folder of weights in a worker's folder."""
    return f"weights/{spec.digest}"


def volume_name(volume: MountedVolume) -> str:
    """Return the name of the folder of a volume in a worker's folder."""
    return f"volumes/{volume.digest}"


def _import_environment(env: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(env)
        if name not in _EXCLUDED_VARIABLES and not name.startswith(_NVIDIA_PREFIX)
    }


def _mount(source: str | Path, target: str, *, writable: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": os.fspath(source), "Target": target, "ReadOnly": not writable}


# Requests to Docker's device drivers. The tests replace NVIDIA's hook by a fake, because the real hook needs a GPU.


def _gpu_requests(gpus: tuple[str, ...], driver: GpuDriver) -> list[dict[str, Any]] | None:
    if not gpus:
        return None
    if driver is GpuDriver.CDI:
        return [{"Driver": "cdi", "DeviceIDs": [f"{CDI_KIND}={uuid}" for uuid in gpus]}]
    return [{"Driver": "nvidia", "DeviceIDs": list(gpus), "Capabilities": [["gpu", "compute", "utility"]]}]
