"""Whether a worker that says that it is parked has given its GPU up. Pure.

    1. the runner tells what the worker says
    2. NVML tells what its processes hold: a sample that was begun after it said so
    3. what is left is leased; more than MOST_LEFT_BYTES, and it ends

Where nobody tells, the worker is believed: without NVML, and under MPS, where a client's memory is its server's.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpufn_core.domain.worker import ParkedMemory

MOST_LEFT_BYTES = 1 << 30  # of one GPU; a CUDA context with its libraries' kernels is a third to two thirds of it


@dataclass(frozen=True)
class Claim:
    """What a worker says that it holds; `at_sample` is the last one that had been begun when it said so."""

    parked: ParkedMemory
    at_sample: int


def prove(claim: Claim, seen_sample: int, held_bytes: int | None) -> ParkedMemory | str | None:
    """What it holds, or why it is not parked; None while that cannot be told. `held_bytes` of one GPU are what the
    sample `seen_sample` has, None where nobody tells."""
    if seen_sample <= claim.at_sample:
        return None
    left_bytes = max(claim.parked.device_bytes, held_bytes or 0)
    if left_bytes > MOST_LEFT_BYTES:
        return f"it says that it is parked, and holds {left_bytes >> 20} MiB of its GPU"
    return ParkedMemory(claim.parked.host_bytes, left_bytes)
