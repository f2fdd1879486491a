"""Verification that a worker that reports itself parked has released its GPU memory. Pure.

    1. The runner forwards the worker's report.
    2. NVML reports the memory of the worker's processes, in a sample that began after the worker's report.
    3. The remaining memory stays leased. If it exceeds MOST_LEFT_BYTES, the worker is ended.

Without such a measurement the worker's report is trusted: without NVML, and under MPS, where the memory of a client
belongs to its server.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpufn_core.domain.worker import ParkedMemory
from gpufn_core.spec.units import format_bytes

MAX_REMAINING_BYTES = 1 << 30  # per GPU; a CUDA context with kernels takes a third to two thirds of it


@dataclass(frozen=True)
class Claim:
    """The memory that a worker reports. `at_sample` is the last sample that had begun at the time of the report."""

    parked: ParkedMemory
    at_sample: int


def verify(claim: Claim, newest_sample: int, held_bytes: int | None) -> ParkedMemory | str | None:
    """Return the memory that stays leased, an error text if the worker is not parked, or None while unknown.
    `held_bytes` is the memory on one GPU in the sample `newest_sample`, None if it cannot be measured."""
    if newest_sample <= claim.at_sample:
        return None
    remaining_bytes = max(claim.parked.device_bytes, held_bytes or 0)
    if remaining_bytes > MAX_REMAINING_BYTES:
        return f"it reports that it is parked, but holds {format_bytes(remaining_bytes)} of its GPU"
    return ParkedMemory(claim.parked.host_bytes, remaining_bytes)
