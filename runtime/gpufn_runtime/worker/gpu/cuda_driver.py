"""Minimal binding of the CUDA driver (libcuda) for checking a GPU share. It needs no framework."""

from __future__ import annotations

import ctypes
from typing import Any

_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED; drivers before CUDA 12.2 do not know it
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3  # before cuInit, and in a child of a process that has called it


class DriverError(RuntimeError):
    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: CUDA error {code}")
        self.code = code


class Driver:
    """Driver API for the first device that this process sees."""

    def __init__(self, library: Any = None) -> None:
        """Load the driver. Raises OSError if there is none."""
        self._library = library or ctypes.CDLL("libcuda.so.1")

    def open(self) -> None:
        """Create the primary context, which libraries use as well; this connects to the MPS daemon, if there is one.
        May block while the daemon's server starts. Raises DriverError."""
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._device = device.value
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._call("cuCtxSetCurrent", context)

    def close(self) -> None:
        """Release the context. The process keeps CUDA initialized."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def multiprocessors(self) -> int:
        return self._attribute(_MULTIPROCESSORS)

    def is_client(self) -> bool | None:
        """Return whether this process is an MPS client, or None if the driver cannot report it."""
        try:
            return bool(self._attribute(_MPS_ENABLED))
        except DriverError as error:
            if error.code == INVALID_VALUE:
                return None
            raise

    def free_bytes(self) -> int:
        return self._memory_info()[0]

    def total_bytes(self) -> int:
        """Return the memory of the whole GPU, also under MPS with a limit."""
        return self._memory_info()[1]

    def _memory_info(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def can_allocate(self, size: int) -> bool:
        """Return whether `size` bytes can be allocated; they are freed at once."""
        address = ctypes.c_uint64()
        try:
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        except DriverError as error:
            if error.code == OUT_OF_MEMORY:
                return False
            raise
        self._call("cuMemFree_v2", ctypes.c_uint64(address.value))
        return True

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
        return value.value

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            raise DriverError(function, code)
