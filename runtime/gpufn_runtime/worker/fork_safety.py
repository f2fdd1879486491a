"""Check whether workers can be forked from this process.

- A fork keeps only the thread that calls it.
- CUDA that a process has initialized is unusable in its children. The driver reports in the parent whether it is.
- torch refuses CUDA in a child ("Cannot re-initialize CUDA in forked subprocess"), even if the parent only counted its
  GPUs, as `torch.cuda.is_available` does. Only a child shows that, so a probe is forked to look.

NVML may be open: torch counts GPUs with it if PYTORCH_NVML_BASED_CUDA_CHECK=1. The NVML of driver 580 loads libcuda,
opens its device files and starts its thread. Forked children can nevertheless use CUDA and NVML
(benchmarks/results/gpu-check-2026-11-26.md), so the driver's answer counts, not its files and threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from typing import Final

from gpufn_runtime.worker.gpu.cuda_driver import NOT_INITIALIZED

_PROBE_TIMEOUT_S: Final = 30.0
_DRIVER_THREAD: Final = "cuda"  # the start of its name, such as cuda00001800007
_LONGEST_REPLY: Final = 16


def thread_count() -> int:
    """Return the number of threads that a fork would lose: all but the main one and, until CUDA is initialized, the
    driver's."""
    others = [thread for thread in os.listdir("/proc/self/task") if thread != str(os.getpid())]
    if not others or _has_initialized_cuda():
        return len(others)
    return sum(not _name_of(thread).startswith(_DRIVER_THREAD) for thread in others)


def reason_not_to_fork(probe_timeout_s: float = _PROBE_TIMEOUT_S) -> str:
    """Return the reason that forbids a fork of this process, such as `started 2 threads, ...`, or an empty string."""
    sees_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if sees_gpus and _has_initialized_cuda():
        return "initialized CUDA, which is then unusable in a forked worker"
    if threads := thread_count():
        return f"started {threads} threads, which would be lost in a fork"
    return _probe(probe_timeout_s) if sees_gpus and "torch.cuda" in sys.modules else ""


def _name_of(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm") as comm:
            return comm.read()
    except FileNotFoundError:  # it has ended
        return _DRIVER_THREAD


def _probe(timeout_s: float) -> str:
    """Return why torch refuses to use CUDA in a forked child; empty if it does not."""
    from_child, to_parent = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            is_bad_fork = getattr(sys.modules["torch.cuda"], "_is_in_bad_fork", lambda: False)
            os.write(to_parent, b"refused" if is_bad_fork() else b"works")
        os._exit(0)
    os.close(to_parent)
    try:
        is_readable, _, _ = select.select([from_child], [], [], timeout_s)
        if not is_readable:
            os.kill(pid, signal.SIGKILL)
            return f"left a state in which a forked process hangs: no answer within {timeout_s:g} s"
        replies = {
            b"works": "",
            b"refused": "made torch initialize CUDA, which torch then refuses to use in a forked worker",
        }
        return replies.get(os.read(from_child, _LONGEST_REPLY), "left a state in which a forked process crashes")
    finally:
        os.close(from_child)
        os.waitpid(pid, 0)


def _has_initialized_cuda() -> bool:
    """Return whether this process has called cuInit. The question itself initializes nothing."""
    with open("/proc/self/maps") as maps:
        if "/libcuda.so" not in maps.read():
            return False
    count = ctypes.c_int()
    return bool(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) != NOT_INITIALIZED)
