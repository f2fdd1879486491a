"""CUPTI's own answer to why a trace has no kernel. kineto logs that below the level that torch shows, and raises
nothing: https://github.com/pytorch/kineto/blob/main/libkineto/src/DeviceUtil.h
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from typing import Any, Final

_CONCURRENT_KERNEL: Final = 10  # of CUpti_ActivityKind
_SUBSCRIBERS: Final = "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"
_ONE_PROFILER: Final = "another profiler uses CUPTI in this worker, such as Nsight or one of the function: end it"
_OLD: Final = "libcupti does not fit the driver: remove other CUDA libraries from LD_LIBRARY_PATH, or update the driver"
_REMEDIES: Final = {
    _SUBSCRIBERS: _ONE_PROFILER,
    "CUPTI_ERROR_MAX_LIMIT_REACHED": _ONE_PROFILER,  # its name before CUDA 11.3
    "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES": "the driver lets only administrators trace: load the module nvidia with "
    "NVreg_RestrictProfilingToAdminUsers=0 (developer.nvidia.com/ERR_NVGPUCTRPERM)",
    "CUPTI_ERROR_NOT_INITIALIZED": _OLD,
    "CUPTI_ERROR_NOT_COMPATIBLE": _OLD,
    "CUPTI_ERROR_HARDWARE_BUSY": "another process profiles this GPU, such as DCGM: pause it",
    "CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED": "this virtual GPU refuses it: enable profiling in the hypervisor",
}
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


def why_nothing_is_recorded() -> str:
    """Return CUPTI's error with a remedy. Tries the two calls that tracers need, and undoes them."""
    path = _library(_loaded())
    if path is None:
        return "libcupti is not loaded: install the torch of CUDA from PyPI, which brings it"
    try:
        error = _error(ctypes.CDLL(path))
    except (OSError, AttributeError) as problem:
        return f"{path} cannot be used ({problem})"
    if error is None:
        return "CUPTI reports no error; a second trace of a process may stay empty: profile a new worker"
    return f"{error}: {_REMEDIES.get(error, 'see its documentation')}"


def _error(cupti: Any) -> str | None:
    status: int = cupti.cuptiActivityEnable(_CONCURRENT_KERNEL)
    if status == 0:
        cupti.cuptiActivityDisable(_CONCURRENT_KERNEL)
        subscriber, callback = ctypes.c_void_p(), _Callback(lambda *_: None)
        status = cupti.cuptiSubscribe(ctypes.byref(subscriber), callback, None)
        if status == 0:
            cupti.cuptiUnsubscribe(subscriber)
            return None
    name = ctypes.c_char_p()
    cupti.cuptiGetResultString(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status} of CUPTI"


def _library(maps: Iterable[str]) -> str | None:
    r"""Return the path of the loaded libcupti.

    >>> _library(["7f0-7f1 r-xp 00000000 08:01 9  /usr/lib/libcupti.so.12\n"])
    '/usr/lib/libcupti.so.12'
    """
    return next((line.split(maxsplit=5)[5].rstrip() for line in maps if "/libcupti.so" in line), None)


def _loaded() -> list[str]:
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        return file.readlines()
    return []
