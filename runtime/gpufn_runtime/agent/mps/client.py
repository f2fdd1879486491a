"""What makes a process a client of a GPU's MPS daemon, within the limits of its share. Pure.

The limit of memory names the only device that the process sees, by its number there: one entry for a device that it
does not see, and the driver drops every limit.
"""

from __future__ import annotations

import os
from pathlib import Path

from gpufn_core.domain.device import DeviceShare
from gpufn_core.protocol.launch import IN_CONTAINER

PIPE_IN_CONTAINER = f"{IN_CONTAINER}/mps"
_MIB = 1 << 20


def client_environment(share: DeviceShare, pipe: str | Path) -> dict[str, str]:
    """Beside CUDA_VISIBLE_DEVICES, which names the GPU by its uuid. `pipe` is the daemon's folder as the client sees
    it."""
    environment = {
        "CUDA_MPS_PIPE_DIRECTORY": os.fspath(pipe),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={share.vram_bytes // _MIB}M",
    }
    if share.sm_percent < 100:
        environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share.sm_percent)
    return environment
