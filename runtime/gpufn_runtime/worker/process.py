"""What the worker does to its own process, before it loads anything of the user's."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from gpufn_core.protocol.launch import WorkerConfig
from gpufn_platform.process import fd_limit

ATEXIT_S = 3.0  # less than what the agent leaves to a worker that its runner has given up
_OPENBLAS_SET_THREADS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")
)


def confine(config: WorkerConfig) -> None:
    """Join the cgroups and set the limits that the agent asks for. OSError when that is not possible."""
    for path in config.cgroup_procs:
        with open(path, "w") as file:
            file.write("0")  # ourselves, and then the kernel need not stop every fork on the machine: see MemoryGroup
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of a process with a model in memory fills the disk
    if config.open_files is not None:
        fd_limit.allow(config.open_files)
    if config.memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (config.memory_limit_bytes, config.memory_limit_bytes))


def explain_crashes() -> None:
    """On a segfault, leave the Python stack in the process's own output, which the agent keeps."""
    if sys.__stderr__ is not None:
        # C's stack would come after it, and the end of what a worker says is what its caller is told.
        python_alone = {"c_stack": False} if sys.version_info >= (3, 14) else {}
        faulthandler.enable(sys.__stderr__.fileno(), all_threads=False, **python_alone)


def use_cores(cpu: float) -> None:
    """Native threads for `cpu` cores, in libraries that a template has loaded with one thread."""
    threads = max(1, math.ceil(cpu))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    if threads > 1:
        for package in ("numpy", "scipy"):
            _use_openblas_threads(package, threads)


def _use_openblas_threads(package: str, threads: int) -> None:
    """Of the OpenBLAS that a wheel carries beside it; it reads its variable when it is loaded, and never again."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return
    import ctypes  # noqa: PLC0415  (numpy has imported it)

    folder = os.path.join(os.path.dirname(os.path.dirname(file)), f"{package}.libs")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if "openblas" in name:
                library = ctypes.CDLL(os.path.join(folder, name), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
                for function in _OPENBLAS_SET_THREADS:
                    if hasattr(library, function):
                        getattr(library, function)(threads)


def vital(work: Callable[[], None]) -> Callable[[], None]:
    """`work` of a thread without which calls that are taken would never end: when it fails, so does the process."""

    def work_or_end() -> None:
        try:
            work()
        except BaseException:
            try:
                traceback.print_exc(file=sys.__stderr__)
                leave(1)
            finally:  # there may be no memory for that
                os._exit(1)

    return work_or_end


def leave(code: int) -> NoReturn:
    """End the process now: threads of the user's that still run do not hold it, and its `atexit` hooks not for long."""
    with contextlib.suppress(RuntimeError):  # no thread can be had: the agent's kill is what bounds it then
        limit = threading.Timer(ATEXIT_S, os._exit, (code,))
        limit.daemon = True
        limit.start()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            if stream is not None:
                stream.flush()
    os._exit(code)


def leave_as_script(error: BaseException | None) -> NoReturn:
    """End a child that the user's code forked, as a script would that ends so."""
    code: object = 1
    if error is None or isinstance(error, SystemExit):
        code = error and error.code
    else:
        with contextlib.suppress(Exception):
            traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
