"""Health scores of GPUs and nodes, from the events of the last hour. Pure.

Each sign has a weight. A score is 1 minus the sum of the weights, at least 0. Below `DRAIN_BELOW`, the advice is to
drain: to stop the agent, so that no new work is placed there. The controller does not act on a score. It acts on the
health that the agent reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from gpufn_core.domain.devices.device import Health

DRAIN_BELOW: Final = 0.5
_MIN_STARTS: Final = 5  # with fewer starts or attempts, a share is meaningless
_MIN_ATTEMPTS: Final = 20
_MIN_FUNCTIONS: Final = 3  # if fewer fail on a node, it is the fault of their code


class Score(msgspec.Struct, frozen=True):
    """`reasons` are the signs, the heaviest first. `drain` is the advice."""

    value: float
    reasons: tuple[str, ...] = ()
    drain: bool = False


class GpuTrend(msgspec.Struct, frozen=True):
    """Events of a GPU in the last hour. None: the GPU does not report it.

    `limited` is the share of the samples in which heat or power brakes limited its clocks.
    """

    health: Health = Health.HEALTHY
    health_reason: str = ""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    rows_remapped: int | None = None
    rows_pending: bool | None = None
    xids: int = 0
    pcie_replays: int | None = None
    limited: float | None = None


class NodeTrend(msgspec.Struct, frozen=True):
    """Events of a node in the last hour. `failing` functions had failed starts, `retrying` ones had retries."""

    starts: int = 0
    failed_starts: int = 0
    failing: int = 0
    attempts: int = 0
    retries: int = 0
    retrying: int = 0


def gpu_score(trend: GpuTrend) -> Score:
    """
    >>> gpu_score(GpuTrend(ecc_corrected=3))
    Score(value=1.0, reasons=(), drain=False)
    >>> gpu_score(GpuTrend(ecc_uncorrected=1, rows_remapped=1))
    Score(value=0.2, reasons=('1 uncorrected memory error', '1 remapped memory row'), drain=True)
    """
    signs: list[tuple[float, str]] = []
    if trend.health is Health.FAILED:
        signs.append((1.0, f"failed: {trend.health_reason}"))
    elif trend.health is Health.DEGRADED:
        signs.append((0.4, f"degraded: {trend.health_reason}"))
    if trend.ecc_uncorrected:
        signs.append((0.5, _count(trend.ecc_uncorrected, "uncorrected memory error")))
    if trend.rows_remapped:
        signs.append((0.3, _count(trend.rows_remapped, "remapped memory row")))
    if trend.rows_pending:
        signs.append((0.2, "memory rows wait for a reset"))
    if (trend.ecc_corrected or 0) >= 1_000:
        signs.append((0.2, f"{trend.ecc_corrected:,} corrected memory errors"))
    if trend.xids:
        signs.append((min(0.5, 0.1 * trend.xids), _count(trend.xids, "Xid error")))
    if (trend.pcie_replays or 0) >= 100:
        signs.append((0.2, f"{trend.pcie_replays:,} repeated PCIe transfers"))
    if (trend.limited or 0.0) >= 0.1:
        share = trend.limited or 0.0
        signs.append((min(0.3, share / 2), f"heat or power brakes limited its clocks {share:.0%} of the time"))
    return _score(signs)


def node_score(trend: NodeTrend, gpus: Iterable[Score]) -> Score:
    """Return the score of a node. It is no better than the mean of its GPUs."""
    signs: list[tuple[float, str]] = []
    begun = trend.starts + trend.failed_starts
    failed = trend.failed_starts / begun if begun >= _MIN_STARTS else 0.0
    if trend.failing >= _MIN_FUNCTIONS and failed >= 0.2:
        signs.append(
            (min(0.6, failed), f"{trend.failed_starts} of {begun} starts failed, of {trend.failing} functions")
        )
    retried = trend.retries / trend.attempts if trend.attempts >= _MIN_ATTEMPTS else 0.0
    if trend.retrying >= _MIN_FUNCTIONS and retried >= 0.1:
        signs.append(
            (
                min(0.4, retried),
                f"{trend.retries} of {trend.attempts} attempts were retried, of {trend.retrying} functions",
            )
        )
    scores = list(gpus)
    sick = sum(score.drain for score in scores)
    if scores and sick:
        lost = 1 - sum(score.value for score in scores) / len(scores)
        signs.append((lost, f"{sick} of its {_count(len(scores), 'GPU')} should be drained"))
    return _score(signs)


def _score(signs: list[tuple[float, str]]) -> Score:
    signs.sort(key=lambda sign: -sign[0])
    lost = sum(weight for weight, _ in signs)
    value = round(max(0.0, 1.0 - lost), 2)
    return Score(value, tuple(reason for _, reason in signs), value < DRAIN_BELOW)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
