"""A session of torch's profiler, the only one of the process, that leaves nothing behind in it.

Findings in its source and issues, with what follows from each. P is github.com/pytorch/pytorch, K is
github.com/pytorch/kineto.

- Two sessions at a time end torch 2.13 with a segmentation fault, whichever starts first, and if one is only prepared
  (`schedule(warmup=1)`). So a session of user code refuses ours, and one that would begin during ours waits.
- kineto initializes CUPTI in the first session, not at the import (K/pull/825). So a worker that was forked from a
  template that imported torch can be traced. Before CUDA 11.2 it did so at the import.
- kineto reports no error of CUPTI. A trace without kernels looks like one of an idle GPU. So a session begins with a
  kernel of its own, without memory; if it is missing, `cupti` finds the reason.
- The first kernels with CUPTI wait for its instrumentation, up to several seconds (K, libkineto/src/init.cpp). The
  session's own kernel pays for that before the time of the trace begins.
- At its end a session synchronizes the current device, for which CUDA creates a context if there is none. So the
  device is one that the process uses, and a process that has not used CUDA has a trace of operators only.
- To synchronize a device invalidates the CUDA graph that another thread captures. So a session does not begin during a
  capture, and waits for its end. Only captures on torch's own stream for them are visible to other threads.
- kineto unloads CUPTI only with TEARDOWN_CUPTI=1: else calls stay slower, by 10 to 20 % in P/pull/146604. Unloading
  crashes with CUDA graphs before CUDA 12.6 (P/pull/150957), so the default stays. With inductor's graphs torch sets
  that variable and DISABLE_CUPTI_LAZY_REINIT itself; they are restored.
- A second session may stay without kernels (github.com/lightseekorg/tokenspeed/pull/1348, CUDA 13.0).
- Tracing needs no privilege from CUDA 10.2 on, in containers neither (developer.nvidia.com/ERR_NVGPUCTRPERM), and works
  on MIG instances (docs.nvidia.com/cupti, special configurations). With MPS, CUPTI's result codes exclude unified
  memory only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

from gpufn_core.errors import Conflict

_CAPTURE_S: Final = 10.0  # longest wait for the end of a capture
_POLL_S: Final = 0.05
_PROBE_CYCLES: Final = 1000
_VARIABLES: Final = ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT")


class CannotTrace(Conflict):
    """This worker cannot trace its GPU, or not in this way."""

    retryable = False


@contextlib.contextmanager
def session(torch: Any) -> Iterator[tuple[Any, bool]]:
    """Record the block. Gives the profiler, which exports the trace afterwards, and whether it records a GPU. Raises
    CannotTrace."""
    importlib.import_module("torch.profiler")
    device = _used_device(torch)
    with _alone(torch.autograd.profiler), _variables_restored(), _current_device(torch, device):
        if device is not None:
            _check(torch)
        profiler = torch.profiler.profile(**_options(torch, device))
        try:
            profiler.start()
            if device is not None:
                torch.cuda._sleep(_PROBE_CYCLES)
                torch.cuda.current_stream().synchronize()
            yield profiler, device is not None
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                _stop(torch, profiler, device)
            raise
        _stop(torch, profiler, device)


def _used_device(torch: Any) -> int | None:
    """Return the CUDA device with most of torch's memory. None if the process does not use CUDA."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    held = [torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count())]
    return held.index(max(held)) if any(held) else None


def _stop(torch: Any, profiler: Any, device: int | None) -> None:
    """Stop after the end of a capture. A session that did not start completely is stopped as well."""
    deadline = time.monotonic() + _CAPTURE_S
    while device is not None and _is_capturing(torch) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    profiler.stop()


def _check(torch: Any) -> None:
    if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        raise CannotTrace(
            f"torch {torch.__version__} was built without CUPTI, so its profiler records no kernel: "
            "install the torch of CUDA from PyPI"
        )
    if _is_capturing(torch):
        raise CannotTrace("this worker captures a CUDA graph, which a profiler would invalidate: try again later")


def _is_capturing(torch: Any) -> bool:
    stream = getattr(torch.cuda.graph, "default_capture_stream", None)
    if stream is None:
        return False
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


def _options(torch: Any, device: int | None) -> dict[str, Any]:
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] if device is None else [kinds.CPU, kinds.CUDA]
    try:
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except (AttributeError, TypeError):  # an older torch: kernels only
        return {"activities": activities}
    return {"activities": activities, "experimental_config": every_thread}


@contextlib.contextmanager
def _alone(profiler: Any) -> Iterator[None]:
    """Let sessions of user code that begin meanwhile wait. Raises CannotTrace if there is one already."""
    own, ended = threading.get_ident(), threading.Event()
    sessions = profiler.profile
    prepare = sessions._prepare_trace

    def prepare_later(session: Any) -> None:
        if threading.get_ident() != own:
            ended.wait()
        prepare(session)

    sessions._prepare_trace = prepare_later
    try:
        if getattr(profiler, "_is_profiler_enabled", False) or any(map(_is_open, _instances(sessions))):
            raise CannotTrace("code of the function runs torch's profiler: a second one at a time crashes the process")
        yield
    finally:
        sessions._prepare_trace = prepare
        ended.set()


def _instances(kind: type) -> list[Any]:
    return [each for each in gc.get_objects() if type(each) is kind]


def _is_open(session: Any) -> bool:
    """Return whether a session is prepared or runs."""
    return session.entered and session.kineto_results is None


@contextlib.contextmanager
def _variables_restored() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _current_device(torch: Any, device: int | None) -> Any:
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)
