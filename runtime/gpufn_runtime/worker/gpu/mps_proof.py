"""The proof that a worker is held to its share, before it is READY.

A process that cannot reach its MPS daemon runs all the same, with the whole GPU and no limit. So, in this order:

1. the context is made; a server that is starting is waited for
2. where the driver tells, it says that this process is a client
3. as many multiprocessors are seen as the share has, not all
4. no more memory is free than the limit, and an allocation above the limit fails

What cannot be known is not asked for: of a share without a ceiling, the number of multiprocessors says nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from gpufn_core.errors import DeviceFailed
from gpufn_core.protocol.launch import MpsLimits
from gpufn_runtime.worker.gpu.cuda_driver import DriverError

_NOT_READY = 807  # CUDA_ERROR_MPS_SERVER_NOT_READY
_PATIENCE_S = 10.0
_FIRST_PAUSE_S = 0.05
_GRANULE = 8  # multiprocessors are given out in groups, the largest of which has so many
_ABOVE_BYTES = 1 << 20


class ShareDriver(Protocol):
    def open(self) -> None: ...
    def multiprocessors(self) -> int: ...
    def is_client(self) -> bool | None: ...
    def free_bytes(self) -> int: ...
    def can_allocate(self, size: int) -> bool: ...


def prove(limits: MpsLimits, driver: ShareDriver, sleep: Callable[[float], None] = time.sleep) -> None:
    """Raises DeviceFailed, which says what is not as it must be."""
    try:
        _open(driver, sleep)
        _check(limits, driver)
    except DriverError as error:
        raise DeviceFailed(f"its share of the GPU cannot be had: {error}") from error


def _open(driver: ShareDriver, sleep: Callable[[float], None]) -> None:
    waited_s, pause_s = 0.0, _FIRST_PAUSE_S
    while True:
        try:
            driver.open()
            return
        except DriverError as error:
            if error.code != _NOT_READY or waited_s >= _PATIENCE_S:
                raise
        sleep(pause_s)
        waited_s += pause_s
        pause_s *= 2


def _check(limits: MpsLimits, driver: ShareDriver) -> None:
    if driver.is_client() is False:
        raise DeviceFailed("it is no client of the MPS daemon: it would have the whole GPU")
    if limits.multiprocessors and limits.sm_percent < 100:
        granted = math.ceil(limits.multiprocessors * limits.sm_percent / 100)
        seen = driver.multiprocessors()
        if seen > granted + _GRANULE:
            raise DeviceFailed(
                f"it sees {seen} of the GPU's {limits.multiprocessors} multiprocessors, and its share has {granted}"
            )
    if (free_bytes := driver.free_bytes()) > limits.vram_bytes:
        raise DeviceFailed(f"{free_bytes:,} bytes are free to it, more than its share's {limits.vram_bytes:,}")
    if driver.can_allocate(limits.vram_bytes + _ABOVE_BYTES):
        raise DeviceFailed(f"it can have more GPU memory than its share's {limits.vram_bytes:,} bytes")
