"""Verify, before a worker is READY, that its GPU share is enforced.

A process that cannot reach its MPS daemon still runs, with the whole GPU and without limits. So check in this order:

1. create the context; wait for a server that is starting
2. if the driver can report it, this process is an MPS client
3. the process sees only its share's number of multiprocessors
4. free memory is not above the limit, and an allocation above the limit fails

Checks that cannot decide are skipped: without a multiprocessor limit their number is meaningless.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from gpufn_core.errors import DeviceFailed
from gpufn_core.protocol.launch import MpsLimits
from gpufn_runtime.worker.gpu.cuda_driver import Driver, DriverError

_NOT_READY = 807  # CUDA_ERROR_MPS_SERVER_NOT_READY
_PATIENCE_S = 10.0
_FIRST_PAUSE_S = 0.05
_GRANULE = 8  # multiprocessors are allocated in groups; the size of the largest group
_EXCESS_BYTES = 1 << 20


def verify(limits: MpsLimits, driver: Driver, sleep: Callable[[float], None] = time.sleep) -> None:
    """Raises DeviceFailed, which names the limit that is not enforced."""
    try:
        _open(driver, sleep)
        _check(limits, driver)
    except DriverError as error:
        raise DeviceFailed(f"cannot use its share of the GPU: {error}") from error


def _open(driver: Driver, sleep: Callable[[float], None]) -> None:
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


def _check(limits: MpsLimits, driver: Driver) -> None:
    if driver.is_client() is False:
        raise DeviceFailed("it is not a client of the MPS daemon: it would use the whole GPU")
    if limits.multiprocessors and limits.sm_percent < 100:
        granted = math.ceil(limits.multiprocessors * limits.sm_percent / 100)
        visible = driver.multiprocessors()
        if visible > granted + _GRANULE:
            raise DeviceFailed(
                f"it sees {visible} of the GPU's {limits.multiprocessors} multiprocessors, but its share has {granted}"
            )
    if (free_bytes := driver.free_bytes()) > limits.vram_bytes:
        raise DeviceFailed(f"{free_bytes:,} bytes are free to it, more than its share's {limits.vram_bytes:,}")
    if driver.can_allocate(limits.vram_bytes + _EXCESS_BYTES):
        raise DeviceFailed(f"it can allocate more GPU memory than its share's {limits.vram_bytes:,} bytes")
