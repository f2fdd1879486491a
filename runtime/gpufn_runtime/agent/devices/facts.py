"""GPU features of a node's software, detected by running the programs rather than from version numbers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from gpufn_core.domain.devices.device import MpsLevel, NodeFacts

_TIMEOUT_S = 5.0
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel
_CGROUP_MEMORY = Path("/sys/fs/cgroup/dmem.capacity")


def node_facts(has_gpus: bool, cgroup_memory: Path = _CGROUP_MEMORY) -> NodeFacts:
    """Detect the features, without the versions, which NVML reports. Runs programs, so it blocks."""
    if not has_gpus:
        return NodeFacts()
    return NodeFacts(mps=_mps_level(cgroup_memory), has_own_pids=has_own_pids())


def has_own_pids(namespace: Path = _PID_NAMESPACE) -> bool:
    """Return whether this process is in its own pid namespace, as in a container without `--pid=host`."""
    try:
        return os.readlink(namespace) != _FIRST_PID_NAMESPACE
    except OSError:  # a sandbox hides it
        return True


def _mps_level(cgroup_memory: Path) -> MpsLevel:
    """Return the MPS level. A level is not claimed if its requirements cannot be checked without a daemon."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return MpsLevel.NONE
    words = _output_of("nvidia-cuda-mps-control", "-p", "3", "-h").split()
    if not {"server", "namespace"} <= set(words):
        return MpsLevel.V2
    try:
        has_limits = "vidmem" in cgroup_memory.read_text()
    except OSError:
        has_limits = False
    return MpsLevel.V3_MEMORY if has_limits else MpsLevel.V3


def _output_of(*command: str) -> str:
    try:
        result = subprocess.run(  # noqa: S603
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout + result.stderr if result.returncode == 0 else ""
