"""Whether MPS can be had on a machine at all, tried before anything is measured with it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from gpu_check.machine import CannotRun, Gpu, Machine
from gpufn_core.errors import DeviceFailed
from gpufn_runtime.agent.mps.control import PROGRAM
from gpufn_runtime.agent.mps.daemon import Daemon

START_TIMEOUT_S = 40.0  # a server that starts where nobody has used the GPU before may have to wake it


def need_mps(machine: Machine) -> Gpu:
    """The GPU that is measured, when a daemon starts for it as the agent's do. Raises CannotRun."""
    gpu = machine.real_gpu()
    machine.need_program(PROGRAM)
    # Its path is short: a daemon listens on unix sockets in it.
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        try:
            asyncio.run(
                _begun_and_ended(
                    Daemon(gpu.uuid, Path(folder) / "gpu", uid=os.getuid(), start_timeout_s=START_TIMEOUT_S)
                )
            )
        except DeviceFailed as error:
            raise CannotRun(f"MPS does not start here: {error.message}") from error
    return gpu


async def _begun_and_ended(daemon: Daemon) -> None:
    await daemon.start()
    await daemon.stop()
