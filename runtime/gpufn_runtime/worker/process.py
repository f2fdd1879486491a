"""What the worker does to its own process, before it loads anything of the user's."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import os
import resource
import sys
from typing import NoReturn

from gpufn.protocol.launch import WorkerConfig


def confine(config: WorkerConfig) -> None:
    """Join the cgroups and set the limits that the agent asks for. OSError when that is not possible."""
    for path in config.cgroup_procs:
        with open(path, "w") as file:
            file.write("0")  # ourselves, and then the kernel need not stop every fork on the machine: see MemoryGroup
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of a process with a model in memory fills the disk
    if config.memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (config.memory_limit_bytes, config.memory_limit_bytes))


def explain_crashes() -> None:
    """On a segfault, leave the Python stack in the process's own output, which the agent keeps."""
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__.fileno(), all_threads=False)


def use_cores(cpu: float) -> None:
    """Native threads for `cpu` cores, in libraries that a template has loaded with one thread."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(max(1, math.ceil(cpu)))


def leave(code: int) -> NoReturn:
    """End the process now: threads of the user's that still run do not hold it."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            if stream is not None:
                stream.flush()
    os._exit(code)
