"""A GPU's compute mode. With the operator's consent a GPU that is shared by MPS is EXCLUSIVE_PROCESS: then nobody gets
on it past the daemon, not even by an accident. It takes root to set, and is set back afterwards."""

from __future__ import annotations

from gpufn_core.errors import DeviceFailed
from gpufn_runtime.agent.mps.control import ControlFailed, run
from gpufn_runtime.agent.workers.environment import driver_environment

EXCLUSIVE = "Exclusive_Process"
_PROGRAM = "nvidia-smi"
_TIMEOUT_S = 10.0


async def read(gpu: str) -> str:
    """As nvidia-smi spells it. Raises DeviceFailed."""
    return (await _ask(gpu, "--query-gpu=compute_mode", "--format=csv,noheader")).strip()


async def write(gpu: str, mode: str) -> None:
    """Raises DeviceFailed."""
    await _ask(gpu, "-c", mode.upper())


async def _ask(gpu: str, *words: str) -> str:
    try:
        return await run([_PROGRAM, "-i", gpu, *words], driver_environment(), timeout_s=_TIMEOUT_S)
    except ControlFailed as error:
        raise DeviceFailed(f"{gpu}: its compute mode cannot be had or set: {error.message}") from error
