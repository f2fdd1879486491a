"""A worker in an environment: the agent's Python enters the sandbox, then becomes the environment's Python.

The environment's Python must not start outside the sandbox: it runs code of its packages at once (.pth files,
sitecustomize).
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import msgspec

from gpufn_core.protocol.launch import CONFINED, WorkerConfig
from gpufn_platform.process.supervisor_fifo import end_with_supervisor
from gpufn_platform.sandbox.enter import enter
from gpufn_runtime.worker import process


def run_within(python: str, config_file: str) -> NoReturn:
    """Confine this process, then run the worker in `python`. Does not return."""
    with open(config_file, "rb") as file:
        config = msgspec.json.decode(file.read(), type=WorkerConfig)
    assert config.sandbox is not None
    try:
        process.move_into_pid_namespace(config.sandbox)
    except OSError as error:
        sys.exit(f"cannot enter the sandbox: {error}")
    if config.supervisor_fifo and not end_with_supervisor(config.supervisor_fifo, also_after_exec=True):
        sys.exit("the platform that started this worker has ended")
    try:
        process.confine(config)
        enter(config.sandbox)
        os.execv(python, [python, "-P", "-m", "gpufn_runtime.worker", CONFINED, config_file])  # noqa: S606
    except (OSError, ValueError) as error:
        sys.exit(f"cannot start the worker in its environment: {error}")
