"""Counters of a function, and what they say about a stretch of time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gpufn_gateway.console.live.latency import quantile
from gpufn_gateway.metrics.histogram import BOUNDS


@dataclass(slots=True)
class Totals:
    """Counters of a function, or their change: ended and failed attempts of all nodes, and the number of calls at this
    gateway by latency (`BOUNDS`)."""

    ended: int = 0
    failed: int = 0
    run_s: float = 0.0
    gpu_s: float = 0.0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))

    def add(self, other: Totals, sign: int = 1) -> None:
        self.ended += sign * other.ended
        self.failed += sign * other.failed
        self.run_s += sign * other.run_s
        self.gpu_s += sign * other.gpu_s
        self.add_latencies(other.latencies, sign)

    def add_latencies(self, counts: Sequence[int], sign: int = 1) -> None:
        for index, count in enumerate(counts):
            if count:
                self.latencies[index] += sign * count

    @property
    def is_empty(self) -> bool:
        return not self.ended and not any(self.latencies)


@dataclass(frozen=True, slots=True)
class Rates:
    """Values of the last `seconds`. None: there was no call, so there is no value."""

    seconds: float = 0.0
    calls_per_s: float = 0.0
    errors_per_s: float = 0.0
    error_share: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    run_s: float | None = None  # mean
    gpus: float = 0.0  # GPU seconds per second


IDLE: Final = Rates()


def rates_of(total: Totals, seconds: float) -> Rates:
    per_s = 1 / seconds if seconds else 0.0
    return Rates(
        seconds=seconds,
        calls_per_s=total.ended * per_s,
        errors_per_s=total.failed * per_s,
        error_share=total.failed / total.ended if total.ended else None,
        p50_s=quantile(0.5, BOUNDS, total.latencies),
        p99_s=quantile(0.99, BOUNDS, total.latencies),
        run_s=total.run_s / total.ended if total.ended else None,
        gpus=total.gpu_s * per_s,
    )
