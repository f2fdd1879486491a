"""Compute mode of a GPU. If the operator permits it, a GPU shared by MPS is set to EXCLUSIVE_PROCESS, so that no
process can bypass the daemon. Setting the mode requires root; it is restored afterwards."""

from __future__ import annotations

from gpufn_core.errors import DeviceFailed
from gpufn_runtime.agent.mps.control import ControlFailed, run
from gpufn_runtime.agent.workers.environment import driver_environment

EXCLUSIVE = "Exclusive_Process"
_PROGRAM = "nvidia-smi"
_TIMEOUT_S = 10.0


async def read(gpu: str) -> str:
    """Return the mode in nvidia-smi's spelling. Raises DeviceFailed."""
    return (await _nvidia_smi(gpu, "--query-gpu=compute_mode", "--format=csv,noheader")).strip()


async def write(gpu: str, mode: str) -> None:
    """Raises DeviceFailed."""
    await _nvidia_smi(gpu, "-c", mode.upper())


async def _nvidia_smi(gpu: str, *args: str) -> str:
    try:
        return await run([_PROGRAM, "-i", gpu, *args], driver_environment(), timeout_s=_TIMEOUT_S)
    except ControlFailed as error:
        raise DeviceFailed(f"{gpu}: cannot read or set its compute mode: {error.message}") from error
