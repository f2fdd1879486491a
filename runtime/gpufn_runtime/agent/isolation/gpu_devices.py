"""CUDA's device file, which must exist before the first sandbox: a sandbox shows the devices that exist at its start.

The driver creates the file when a program first uses CUDA, by the setuid program nvidia-modprobe. In a sandbox it has
no privileges.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from gpufn_runtime.agent.workers.environment import driver_environment

log = logging.getLogger(__name__)

_PROGRAM = "nvidia-modprobe"
_WITHIN_S = 30


def create(devices: Path = Path("/dev"), find: Callable[[str], str | None] = shutil.which) -> None:
    """Create the file if there is a driver but no file. Logs a failure: workers with a GPU would fail to start."""
    if not (devices / "nvidiactl").exists() or (devices / "nvidia-uvm").exists():
        return
    program = find(_PROGRAM)
    if program is None:
        log.warning("there is no /dev/nvidia-uvm, which CUDA needs, and no %s to create it", _PROGRAM)
        return
    try:
        subprocess.run([program, "-u", "-c=0"], check=True, timeout=_WITHIN_S, env=driver_environment())  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("cannot create /dev/nvidia-uvm, which CUDA needs: %s", error)
