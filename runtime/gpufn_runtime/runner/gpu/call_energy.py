"""Energy of calls: the energy of a GPU, divided among the calls that ran on it. Pure.

The agent samples the energy counters of the GPUs about once a second. The energy between two samples is divided among
the calls that ran in that time, in proportion to their GPU seconds on that GPU. If no call ran, no call bears it.

So a call is charged the entire energy of the seconds in which it ran alone. This includes the energy of the idle GPU in
the rest of its first and last second, and the energy of foreign processes. The sum over calls never exceeds the
counter.

The energy of a call is unknown if one of its GPUs has no counter, if the counter was reset, or if no sample was taken
before the call began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gpufn_core.domain.devices.device_metrics import DeviceMetrics
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_runtime.runner.core.attempt import Attempt, AttemptState

_SILENT_S: Final = 10.0  # without a sample for so long, the ended calls are forgotten: they would fill the memory


@dataclass
class _Account:
    """`gpu_s` are the GPU seconds until the last sample, `joules` their energy; None if unknown."""

    joules: float | None
    gpu_s: float = 0.0
    has_ended: bool = False


class CallEnergy:
    def __init__(self) -> None:
        self._counters: dict[str, float] = {}  # joules, by GPU
        self._sampled_at: float | None = None  # monotonic
        self._accounts: dict[Attempt, _Account] = {}

    def end(self, attempt: Attempt, now: float) -> None:
        """Close the account of an attempt that has ended, at the next sample."""
        if not attempt.worker.gpus or self._sampled_at is None:
            return
        if now - self._sampled_at > _SILENT_S:
            self._accounts.clear()
            self._sampled_at = None
            return
        self._account(attempt).has_ended = True

    def on_sample(
        self, metrics: Iterable[DeviceMetrics], running: Iterable[Attempt], now: float
    ) -> list[tuple[InvocationMessage, float]]:
        """Return the calls whose attempts have ended, with the joules of each attempt, if known."""
        for attempt in running:
            self._account(attempt)
        self._divide(self._spent(metrics), now)
        self._sampled_at = now
        ended = [(attempt.message, account.joules) for attempt, account in self._accounts.items() if account.has_ended]
        self._accounts = {
            attempt: account
            for attempt, account in self._accounts.items()
            if not account.has_ended and attempt.state is not AttemptState.ENDED  # it was handed back
        }
        return [(message, joules) for message, joules in ended if joules is not None]

    def _account(self, attempt: Attempt) -> _Account:
        if (account := self._accounts.get(attempt)) is None:
            is_complete = self._sampled_at is not None and attempt.run.began >= self._sampled_at
            account = self._accounts[attempt] = _Account(joules=0.0 if is_complete else None)
        return account

    def _spent(self, metrics: Iterable[DeviceMetrics]) -> dict[str, float]:
        """Return the joules of each GPU since the last sample. GPUs with unknown energy are omitted."""
        before = self._counters if self._sampled_at is not None else {}
        self._counters = {item.uuid: item.energy_joules for item in metrics if item.energy_joules is not None}
        return {
            uuid: joules - before[uuid]
            for uuid, joules in self._counters.items()
            if uuid in before and joules >= before[uuid]
        }

    def _divide(self, spent: Mapping[str, float], now: float) -> None:
        new_s: dict[Attempt, float] = {}  # GPU seconds on each of its GPUs since the last sample
        totals: dict[str, float] = {}  # the same of all attempts, by GPU
        for attempt, account in self._accounts.items():
            gpus, gpu_s = attempt.worker.gpus, attempt.gpu_s_until(now)
            new_s[attempt] = max(0.0, gpu_s - account.gpu_s) / len(gpus)  # a batch ends with fewer than it had so far
            account.gpu_s = gpu_s
            for gpu in gpus:
                totals[gpu] = totals.get(gpu, 0.0) + new_s[attempt]
        for attempt, account in self._accounts.items():
            gpus = attempt.worker.gpus
            if account.joules is None or any(gpu not in spent for gpu in gpus):
                account.joules = None
            elif new_s[attempt]:
                account.joules += sum(spent[gpu] * new_s[attempt] / totals[gpu] for gpu in gpus)
