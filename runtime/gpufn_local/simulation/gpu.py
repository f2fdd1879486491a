"""The workers in the memory of a simulated GPU, by the platform's rules. A limited number shares the GPU. An idle
worker is stopped after a timeout. The worker that was idle the longest makes room for another. A stopped worker is
parked while the host has memory for it. The controller's `HostMemory` decides which parked worker is evicted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec

from gpufn_gateway.controller.decide.room.host_memory import HostMemory, Parked
from gpufn_local.simulation.traces import Function

_GIB = 1 << 30


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Up to `turns` calls run at a time and are assumed not to slow each other down. `park_gib` is host memory for
    parked workers."""

    turns: int = 1
    overrun_s: float = 10.0  # option of fair queueing
    memory_gib: float = 24.0
    park_gib: float = 0.0
    workers: int = 8  # limit of workers that share the GPU
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
        self._idle: list[_Worker] = []  # in order of idle time, longest first
        self._parked: dict[str, _Worker] = {}
        self._host = HostMemory()
        self._numbers = itertools.count()

    def __contains__(self, function: str) -> bool:
        return any(worker.function.name == function for worker in (*self._busy, *self._idle))

    def take(self, function: Function, now: float) -> float:
        """Give a call to a worker of `function`; return the seconds until it starts, 0.0 for a warm worker."""
        while self._idle and now - self._idle[0].idle_since >= self.gpu.idle_timeout_s:
            self._stop_oldest()
        if (warm := _of(function, self._idle)) is not None:
            self._idle.remove(warm)
            self._busy.append(warm)
            return 0.0
        # Busy workers cannot be stopped. If that does not suffice, the simulated GPU memory is overcommitted.
        while self._idle and not self._has_room(function):
            self._stop_oldest()
        parked = _of(function, self._parked.values())
        if parked is not None:
            self._unpark(parked)
            parked.resumed += 1
            self.resumes += 1
        else:
            self.cold_starts += 1
        self._busy.append(parked or _Worker(f"w-{next(self._numbers)}", function))
        return function.resume_s if parked is not None else function.cold_start_s

    def release(self, function: Function, now: float) -> None:
        """End a call of `function`."""
        worker = _of(function, self._busy)
        assert worker is not None
        self._busy.remove(worker)
        worker.idle_since = now
        self._idle.append(worker)

    def _has_room(self, function: Function) -> bool:
        workers = (*self._busy, *self._idle)
        used_gib = sum(worker.function.memory_gib for worker in workers)
        return len(workers) < self.gpu.workers and used_gib + function.memory_gib <= self.gpu.memory_gib

    def _stop_oldest(self) -> None:
        """Park the worker that was idle longest, or stop it if the host has no memory for it."""
        worker = self._idle.pop(0)
        needed = int(worker.function.memory_gib * _GIB)
        budget = int(self.gpu.park_gib * _GIB)
        if needed > budget:
            return
        for name in self._host.victims(self._host.used + needed - budget):
            self._host.evict(name)
            self._unpark(self._parked[name])
        self._parked[worker.name] = worker
        self._host.add(Parked(worker.name, needed, worker.resumed + 1, worker.function.saved_s))

    def _unpark(self, parked: _Worker) -> None:
        del self._parked[parked.name]
        self._host.release(parked.name)


def _of(function: Function, workers: Iterable[_Worker]) -> _Worker | None:
    return next((worker for worker in workers if worker.function is function), None)
