"""Setup and exit of the worker's own process."""

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

from gpufn_core.protocol.launch import PID_VARIABLE, Sandbox, WorkerConfig
from gpufn_platform.process import fd_limit
from gpufn_platform.sandbox.enter import enter_pid_namespace

ATEXIT_S = 3.0  # less than the agent's timeout for a worker without a runner
_OPENBLAS_SET_THREADS = tuple(
    f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", "")
)


def move_into_pid_namespace(sandbox: Sandbox | None) -> None:
    """Go on in a child process, in a PID namespace, if the agent waits for its pid. Raises OSError."""
    descriptor = int(os.environ.pop(PID_VARIABLE, "-1"))
    if descriptor >= 0 and sandbox is not None:
        try:
            enter_pid_namespace(sandbox, report=lambda pid: os.write(descriptor, str(pid).encode()))
        finally:
            os.close(descriptor)  # without a pid the agent goes on with this process


def confine(config: WorkerConfig) -> None:
    """Join the cgroups and set the limits that the agent configured. Raises OSError if that fails."""
    for path in config.cgroup_procs:
        with open(path, "w") as file:
            file.write("0")  # joining ourselves does not make the kernel stop all forks on the machine: see MemoryGroup
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump with a model in memory would fill the disk
    if config.open_files is not None:
        fd_limit.set_soft_limit(config.open_files)
    if config.memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (config.memory_limit_bytes, config.memory_limit_bytes))


def enable_crash_tracebacks() -> None:
    """On a segfault, write the Python stack to the process's own output, which the agent stores."""
    if sys.__stderr__ is not None:
        # C's stack would follow it, but the caller is shown the end of a worker's output.
        options = {"c_stack": False} if sys.version_info >= (3, 14) else {}
        faulthandler.enable(sys.__stderr__.fileno(), all_threads=False, **options)


def use_cores(cpu: float) -> None:
    """Set the number of native threads to `cpu` cores, in libraries that a template process loaded with one thread."""
    threads = max(1, math.ceil(cpu))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    if threads > 1:
        for package in ("numpy", "scipy"):
            _use_openblas_threads(package, threads)


def _use_openblas_threads(package: str, threads: int) -> None:
    """Set the threads of the OpenBLAS in a package's wheel, which reads its environment variable only when loaded."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return
    import ctypes  # noqa: PLC0415  (already imported by numpy)

    folder = os.path.join(os.path.dirname(os.path.dirname(file)), f"{package}.libs")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if "openblas" in name:
                library = ctypes.CDLL(os.path.join(folder, name), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
                for function in _OPENBLAS_SET_THREADS:
                    if hasattr(library, function):
                        getattr(library, function)(threads)


def exit_on_failure(work: Callable[[], None]) -> Callable[[], None]:
    """Wrap the main function of a thread that calls depend on: if it raises, the process exits."""

    def work_or_exit() -> None:
        try:
            work()
        except BaseException:
            try:
                traceback.print_exc(file=sys.__stderr__)
                exit_now(1)
            finally:  # if there is no memory for that
                os._exit(1)

    return work_or_exit


def exit_now(code: int) -> NoReturn:
    """Exit the process now: running user threads do not delay it, and `atexit` hooks only for a limited time."""
    with contextlib.suppress(RuntimeError):  # cannot start a thread: then the agent's kill limits the time
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


def exit_like_script(error: BaseException | None) -> NoReturn:
    """Exit a child that user code forked like a script that ends this way."""
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
