"""The workers that a GPU has in memory, by the platform's rules: so many may share it by time, one that is idle for
long goes, and when there is no room the one goes that was idle the longest. Who goes is parked while the host has
memory for it, and of the parked ones the controller's `HostMemory` says who ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from gpufn_gateway.controller.decide.host_memory import HostMemory, Parked
from gpufn_local.simulation.traces import Function

_GIB = 1 << 30


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """`turns` calls are on it at a time, and are taken not to slow each other down. `park_gib` of the host's memory are
    for parked workers."""

    turns: int = 1
    overrun_s: float = 10.0  # of fair queueing
    memory_gib: float = 24.0
    park_gib: float = 0.0
    workers: int = 8  # that may share it
    idle_timeout_s: float = 60.0


class _Worker:
    def __init__(self, name: str, function: Function) -> None:
        self.name = name
        self.function = function
        self.idle_since = 0.0
        self.resumed = 0


class Residents:
    """
    >>> f, g = (Function(name, calls_per_s=1, service_s=1, memory_gib=20) for name in "fg")
    >>> residents = Residents(Gpu(memory_gib=24, park_gib=40))
    >>> residents.take(f, now=0.0); residents.release(f, now=5.0); residents.take(f, now=6.0)
    10.8
    0.0
    >>> residents.release(f, now=7.0); residents.take(g, now=8.0); residents.release(g, now=20.0)  # f is parked
    10.8
    >>> residents.take(f, now=21.0)
    2.1
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.cold_starts = self.resumes = 0
        self._busy: list[_Worker] = []
        self._idle: list[_Worker] = []  # the longest first
        self._parked: dict[str, _Worker] = {}
        self._host = HostMemory()
        self._numbers = itertools.count()

    def __contains__(self, function: str) -> bool:
        return any(worker.function.name == function for worker in (*self._busy, *self._idle))

    def take(self, function: Function, now: float) -> float:
        """A worker of `function` gets a call: the seconds until it begins, 0.0 for a warm one."""
        while self._idle and now - self._idle[0].idle_since >= self.gpu.idle_timeout_s:
            self._put_away()
        if (warm := _of(function, self._idle)) is not None:
            self._idle.remove(warm)
            self._busy.append(warm)
            return 0.0
        # What works cannot go: should that not do, there is more on the GPU than it has memory for.
        while self._idle and not self._has_room(function):
            self._put_away()
        parked = _of(function, self._parked.values())
        if parked is not None:
            self._end(parked)
            parked.resumed += 1
            self.resumes += 1
        else:
            self.cold_starts += 1
        self._busy.append(parked or _Worker(f"w-{next(self._numbers)}", function))
        return function.resume_s if parked is not None else function.cold_start_s

    def release(self, function: Function, now: float) -> None:
        """A call of `function` ended."""
        worker = _of(function, self._busy)
        assert worker is not None
        self._busy.remove(worker)
        worker.idle_since = now
        self._idle.append(worker)

    def _has_room(self, function: Function) -> bool:
        here = (*self._busy, *self._idle)
        used_gib = sum(worker.function.memory_gib for worker in here)
        return len(here) < self.gpu.workers and used_gib + function.memory_gib <= self.gpu.memory_gib

    def _put_away(self) -> None:
        """Park who has been idle the longest; without memory for it, it ends."""
        worker = self._idle.pop(0)
        taken = int(worker.function.memory_gib * _GIB)
        budget = int(self.gpu.park_gib * _GIB)
        if taken > budget:
            return
        for name in self._host.victims(self._host.used + taken - budget):
            self._host.evict(name)
            self._end(self._parked[name])
        self._parked[worker.name] = worker
        self._host.hold(Parked(worker.name, taken, worker.resumed + 1, worker.function.saved_s))

    def _end(self, parked: _Worker) -> None:
        """It is parked no longer."""
        del self._parked[parked.name]
        self._host.release(parked.name)


def _of(function: Function, workers: Iterable[_Worker]) -> _Worker | None:
    return next((worker for worker in workers if worker.function is function), None)
