"""The order of the engines of a build, by their measured latency. A worker uses the first that loads.

The chain of backends (`identity.chain`) is the default order. An engine goes before an earlier one of the chain only if

- both are for the GPU: an engine for the CPU of a GPU worker is a substitute, however fast it is
- the timings of both settled (`checks.measure`)
- its median is less by more than `MARGIN`, so that noise does not change the choice from build to build
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpufn_core.domain.devices.engine import Backend, Latency

MARGIN: Final = 0.10  # medians of the same engine differ by so much: the windows of a measurement agree within 10 %


def ranked(latencies: Mapping[Backend, Latency | None]) -> tuple[Backend, ...]:
    """Return the backends, the best first. `latencies` are in the order of the chain."""
    remaining = dict(latencies)
    order = []
    while remaining:
        best = next(iter(remaining))
        for backend in remaining:
            if _beats(backend, best, remaining):
                best = backend
        order.append(best)
        del remaining[best]
    return tuple(order)


def _beats(backend: Backend, other: Backend, latencies: Mapping[Backend, Latency | None]) -> bool:
    latency, other_latency = latencies[backend], latencies[other]
    if latency is None or other_latency is None or not (backend.on_gpu and other.on_gpu):
        return False
    has_settled = latency.settled and other_latency.settled
    return has_settled and latency.p50_s < other_latency.p50_s * (1 - MARGIN)
