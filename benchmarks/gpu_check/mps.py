"""Preliminary check that MPS works on this machine, before anything is measured with it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from gpu_check.machine import CannotRun, Gpu, Machine
from gpufn_core.errors import DeviceFailed
from gpufn_runtime.agent.mps.control import PROGRAM
from gpufn_runtime.agent.mps.daemon import Daemon

START_TIMEOUT_S = 40.0  # a starting server may have to wake an unused GPU


def need_mps(machine: Machine) -> Gpu:
    """Return the measured GPU if an MPS daemon starts for it, as the agent's daemons do. Raises CannotRun."""
    gpu = machine.real_gpu()
    machine.need_program(PROGRAM)
    # The path must be short: the daemon listens on unix sockets in it.
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        try:
            asyncio.run(
                _start_and_stop(
                    Daemon(gpu.uuid, Path(folder) / "gpu", uid=os.getuid(), start_timeout_s=START_TIMEOUT_S)
                )
            )
        except DeviceFailed as error:
            raise CannotRun(f"MPS does not start here: {error.message}") from error
    return gpu


async def _start_and_stop(daemon: Daemon) -> None:
    await daemon.start()
    await daemon.stop()
