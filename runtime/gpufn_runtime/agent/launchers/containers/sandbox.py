"""What a worker's container may do, and what it sees. Pure: the one place that says how workers are confined.

/gpufn/worker     its folder, read-only: config, the runner's socket, its output, `bundle/` and `engines/<key>/`
/gpufn/parcels    large bodies of its calls, to read and to write
/gpufn/lib        our package, read-only
/gpufn/mps        of a worker that shares its GPU by MPS: where its daemon is found; /dev/shm may be the daemon's
/tmp              its home and scratch space, in memory, which counts as its own
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gpufn_core.protocol.launch import CONTAINED, IN_CONTAINER, WorkerConfig
from gpufn_runtime.agent.mps.base import Mounts
from gpufn_runtime.agent.mps.client import PIPE_IN_CONTAINER

_PIDS = 1024  # threads count as well
_LEAST_TMP_BYTES = 64 << 20
_LOG = {"type": "json-file", "config": {"max-size": "64k", "max-file": "1"}}  # what is said before there is a worker
# One that asks for a tenth of a core weighs as much as a process that asks for nothing, which is 1,024 to the kernel:
# less, and on a busy machine its imports take ten times as long as those of a worker that is a process.
_SHARES_PER_CORE = 10_240
_MOST_SHARES = 262_144

LIB = f"{IN_CONTAINER}/lib"
WORKER = f"{IN_CONTAINER}/worker"
PARCELS = f"{IN_CONTAINER}/parcels"
SCRATCH = "/tmp"  # noqa: S108  (of the container's own)

# Of a function's variables those that say where Python is, or what NVIDIA's runtime gives: not before it is a worker.
_NOT_TO_START_WITH = ("PATH", "PYTHONHOME", "PYTHONPATH")
_OF_NVIDIA = "NVIDIA_"


@dataclass(frozen=True)
class Limits:
    """What is fixed when a container is made: a standby serves workers that have the same. `gpus` are uuids, `env` is
    what modules read as they are imported, which is before there is a worker."""

    memory_bytes: int
    cpu: float
    egress: bool = False
    gpus: tuple[str, ...] = ()
    mps: Mounts | None = None
    env: frozenset[tuple[str, str]] = field(default=frozenset(), repr=False)


@dataclass(frozen=True)
class Sandbox:
    """In docker-py's words: `container_config` for `create_container`, `host_config` for `create_host_config`."""

    container_config: Mapping[str, Any]
    host_config: Mapping[str, Any]


def sandbox(
    limits: Limits, *, uid: int, folder: Path, parcels: Path, packages: Iterable[str], modules: Iterable[str]
) -> Sandbox:
    """`packages` are the folders of our packages on this host; `modules` are imported before there is a worker."""
    mounts = [
        _mount(folder, WORKER),
        _mount(parcels, PARCELS, writable=True),
        *(_mount(package, f"{LIB}/{os.path.basename(package)}") for package in packages),
    ]
    if limits.mps is not None:
        mounts.append(_mount(limits.mps.pipe, PIPE_IN_CONTAINER, writable=True))
        if limits.mps.memory:
            mounts.append(_mount(limits.mps.memory, "/dev/shm", writable=True))  # noqa: S108
    tmp_bytes = max(limits.memory_bytes // 2, _LEAST_TMP_BYTES)
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
                "USER": "worker",  # there is no entry of its uid to look it up in
                "LOGNAME": "worker",
                "LANG": "C.UTF-8",
                **_to_import_with(limits.env),
                "PYTHONPATH": LIB,
                **_gpu_environment(limits.gpus),
            },
        },
        host_config={
            "network_mode": "bridge" if limits.egress else "none",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
            "read_only": True,
            "tmpfs": {SCRATCH: f"rw,nosuid,nodev,size={tmp_bytes},mode=1777"},
            "shm_size": tmp_bytes,
            "mounts": mounts,
            "pids_limit": _PIDS,
            "mem_limit": limits.memory_bytes,
            "memswap_limit": limits.memory_bytes,  # together: no swap
            # A share of time, not cores of its own.
            "cpu_shares": min(max(2, int(limits.cpu * _SHARES_PER_CORE)), _MOST_SHARES),
            "ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            "ipc_mode": "private",
            "log_config": _LOG,
            "device_requests": _gpu_requests(limits.gpus),
        },
    )


def inside(config: WorkerConfig) -> WorkerConfig:
    """The same as its worker sees it; the container holds it to its limits."""
    return msgspec.structs.replace(
        config,
        socket=f"{WORKER}/s",
        bundle_dir=f"{WORKER}/bundle" if config.bundle_dir else "",
        engines={
            parameter: tuple(f"{WORKER}/engines/{os.path.basename(folder)}" for folder in folders)
            for parameter, folders in config.engines.items()
        },
        parcels=PARCELS,
        supervisor_fifo="",
        memory_limit_bytes=None,
        open_files=None,
        cgroup_procs=(),
    )


def _to_import_with(env: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {
        name: value for name, value in sorted(env) if name not in _NOT_TO_START_WITH and not name.startswith(_OF_NVIDIA)
    }


def _mount(source: str | Path, target: str, *, writable: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": os.fspath(source), "Target": target, "ReadOnly": not writable}


# NVIDIA's container runtime, as data. The tests run a stand-in for its hook: the real one takes a GPU.


def _gpu_requests(gpus: tuple[str, ...]) -> list[dict[str, Any]] | None:
    if not gpus:
        return None
    return [{"Driver": "nvidia", "DeviceIDs": list(gpus), "Capabilities": [["gpu", "compute", "utility"]]}]


def _gpu_environment(gpus: tuple[str, ...]) -> dict[str, str]:
    """An image made for GPUs asks its runtime for all of them unless it is told otherwise."""
    return {"NVIDIA_VISIBLE_DEVICES": ",".join(gpus) or "void"}
