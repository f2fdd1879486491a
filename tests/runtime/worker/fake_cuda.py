"""Fake libcuda with the calls for checking a share: it follows MPS's rules for a client's environment."""

# ruff: noqa: N802

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MIB = 1 << 20


class FakeCuda:
    """`environment` is the process's. `reaches`: whether its daemon responds; `not_ready`: how many attempts find the
    server starting; `knows_mps`: whether the driver is new enough to report MPS."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        multiprocessors: int = 108,
        memory_bytes: int = 80 << 30,
        reaches: bool = True,
        not_ready: int = 0,
        knows_mps: bool = True,
        fails: int = 0,
    ) -> None:
        self._is_client = reaches and "CUDA_MPS_PIPE_DIRECTORY" in environment
        self._environment = environment
        self._multiprocessors = multiprocessors
        self._limit = _limit(environment) if self._is_client else None
        self._memory_bytes = memory_bytes
        self._allocated = 0
        self._not_ready = not_ready
        self._knows_mps = knows_mps
        self._fails = fails
        self.tries = 0

    def cuInit(self, flags: int) -> int:
        self.tries += 1
        if self.tries <= self._not_ready:
            return 807
        return self._fails

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        if attribute == 133:
            value._obj.value = int(self._is_client)
            return 0 if self._knows_mps else 1
        percent = int(self._environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")) if self._is_client else 100
        value._obj.value = 2 * math.ceil(self._multiprocessors * percent / 200)
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value = min(self._limit or self._memory_bytes, self._memory_bytes) - self._allocated
        total._obj.value = self._memory_bytes
        return 0

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        if size.value > (self._limit or self._memory_bytes):
            return 2
        self._allocated += size.value
        address._obj.value = size.value
        return 0

    def cuMemFree_v2(self, address: Any) -> int:
        self._allocated -= address.value
        return 0

    @property
    def allocated(self) -> int:
        return self._allocated


def _limit(environment: Mapping[str, str]) -> int | None:
    """The limit in bytes. An entry for a device that the process does not see, or without a key, has no effect."""
    seen = environment["CUDA_VISIBLE_DEVICES"].split(",")
    found = None
    for entry in environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "").split(","):
        device, _, amount = entry.partition("=")
        if not amount or (device not in seen and not (device.isdigit() and int(device) < len(seen))):
            return None
        found = int(amount.rstrip("GM")) * (MIB if amount.endswith("M") else 1 << 30)
    return found
