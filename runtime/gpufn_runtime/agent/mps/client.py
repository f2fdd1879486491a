"""Environment that makes a process a client of a GPU's MPS daemon, within the limits of its share. Pure.

The memory limit refers to the only device that the process sees, by its index there. If the limit also named a device
that the process does not see, the driver would ignore all limits.

Kernels of clients below normal priority run after waiting kernels of the other clients (NVIDIA, Multi-Process Service,
CUDA_MPS_CLIENT_PRIORITY). There are two levels, so functions of class `hi` and `normal` have the same one.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpufn_core.domain.devices.device import DeviceShare
from gpufn_core.protocol.launch import IN_CONTAINER
from gpufn_core.spec.priority import Priority

PIPE_IN_CONTAINER = f"{IN_CONTAINER}/mps"
_MIB = 1 << 20
_BELOW_NORMAL = "1"


def client_environment(share: DeviceShare, pipe: str | Path, priority: Priority) -> dict[str, str]:
    """Return the variables needed in addition to CUDA_VISIBLE_DEVICES, which holds the GPU's uuid. `pipe` is the
    daemon's pipe folder as seen by the client, `priority` the class of the worker's function."""
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": os.fspath(pipe),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={share.vram_bytes // _MIB}M",
    }
    if share.sm_percent < 100:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share.sm_percent)
    if priority is Priority.LOW:
        environment["CUDA_MPS_CLIENT_PRIORITY"] = _BELOW_NORMAL
    return environment
