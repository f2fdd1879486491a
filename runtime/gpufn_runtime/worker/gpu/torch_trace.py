"""Trace of the GPU and of torch's operators, by torch's own profiler, in its own thread.

It sees the kernels of the whole process and, with a torch that can profile all threads, the operators that start them.
Calls are ranges in it (`call_ranges`). `torch_session` lists what goes wrong with it on real machines.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
import threading
import time
import zlib
from typing import Any, Final

from gpufn_core.errors import GpufnError
from gpufn_core.protocol.frames import Trace, Traced
from gpufn_core.protocol.profiles import LONGEST_GPU_PROFILE_S, MAX_TRACE_BYTES
from gpufn_core.spec.units import format_bytes
from gpufn_runtime.worker.execute import call_ranges
from gpufn_runtime.worker.gpu import cupti, torch_session
from gpufn_runtime.worker.gpu.torch_session import CannotTrace
from gpufn_runtime.worker.link import Link

_CHUNK_BYTES: Final = 1 << 20
_KERNEL: Final = b'"cat": "kernel"'  # as kineto writes it


def start(link: Link, frame: Trace) -> None:
    threading.Thread(target=_trace, args=(link, frame), name="gpufn-trace", daemon=True).start()


def _trace(link: Link, frame: Trace) -> None:
    try:
        trace = record(min(frame.seconds, LONGEST_GPU_PROFILE_S))
    except GpufnError as error:
        link.send(Traced(frame.number, error.info()))
    else:
        link.send(Traced(frame.number), trace)


def record(seconds: float) -> bytes:
    """Return the compressed trace. Raises CannotTrace."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise CannotTrace("this worker has not imported torch, whose profiler records the GPU")
    try:
        with tempfile.TemporaryDirectory(prefix="gpufn-trace-") as folder:
            path = os.path.join(folder, "trace.json")
            _record(torch, seconds, path)
            compressed = _compressed(path)
    except CannotTrace:
        raise
    except Exception as error:  # an error of torch, of user code that changed torch, or of a full disk
        raise CannotTrace(f"torch's profiler failed: {type(error).__name__}: {error}"[:1000]) from error
    if compressed is None:
        raise CannotTrace(
            f"the compressed trace has more than {format_bytes(MAX_TRACE_BYTES)}: profile less than {seconds:g} s"
        )
    return compressed


def _compressed(path: str) -> bytes | None:
    """Return a file compressed by gzip, None if it is too large. Torch does that too, but line by line, and waits for
    the GIL of user code at each."""
    gzip, parts, size = zlib.compressobj(wbits=31), [], 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            parts.append(gzip.compress(chunk))
            size += len(parts[-1])
            if size > MAX_TRACE_BYTES:
                return None
    parts.append(gzip.flush())
    return b"".join(parts) if size + len(parts[-1]) <= MAX_TRACE_BYTES else None


def _record(torch: Any, seconds: float, path: str) -> None:
    with torch_session.session(torch) as (profiler, is_gpu), call_ranges.opened(lambda name: _range(torch, name)):
        time.sleep(seconds)
    profiler.export_chrome_trace(path)
    if is_gpu and not _has_kernel(path):
        raise CannotTrace(f"torch's profiler recorded no kernel, not even its own: {cupti.why_nothing_is_recorded()}")


def _has_kernel(path: str) -> bool:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.find(_KERNEL) >= 0


@contextlib.contextmanager
def _range(torch: Any, name: str) -> Any:
    """A range in torch's trace and, with CUDA, an NVTX range, which Nsight shows."""
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name) if has_cuda else contextlib.nullcontext():
        yield
