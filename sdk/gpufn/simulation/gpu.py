"""The workers that a GPU has in memory, by the platform's rules: so many may share it by time, one that is idle for
long goes, and when there is no room the one goes that was idle the longest."""

from __future__ import annotations

import msgspec

from .traces import Function


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """`turns` calls are on it at a time, and are taken not to slow each other down."""

    turns: int = 1
    overrun_s: float = 10.0  # of fair queueing
    memory_gib: float = 24.0
    workers: int = 8  # that may share it
    idle_timeout_s: float = 60.0


class Residents:
    """
    >>> f, g = (Function(name, calls_per_s=1, service_s=1, cold_start_s=2.0, memory_gib=20) for name in "fg")
    >>> residents = Residents(Gpu(memory_gib=24))
    >>> residents.take(f, now=0.0); residents.release(f, now=5.0); residents.take(f, now=6.0)
    2.0
    0.0
    >>> residents.release(f, now=7.0); residents.take(g, now=8.0)  # f has to go
    2.0
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._busy: list[Function] = []
        self._idle: list[tuple[float, Function]] = []  # since when; the longest first
        self.cold_starts = 0

    def __contains__(self, function: str) -> bool:
        return any(each.name == function for each in self._busy) or any(each.name == function for _, each in self._idle)

    def take(self, function: Function, now: float) -> float:
        """A worker of `function` gets a call: the seconds until it begins, 0.0 for a warm one."""
        self._idle = [(since, each) for since, each in self._idle if now - since < self.gpu.idle_timeout_s]
        warm = next((worker for worker in self._idle if worker[1] is function), None)
        if warm is not None:
            self._idle.remove(warm)
        else:
            self.cold_starts += 1
            # What works cannot go: should that not do, there is more on the GPU than it has memory for.
            while self._idle and not self._has_room(function):
                self._idle.pop(0)
        self._busy.append(function)
        return 0.0 if warm is not None else function.cold_start_s

    def release(self, function: Function, now: float) -> None:
        """A call of `function` ended."""
        self._busy.remove(function)
        self._idle.append((now, function))

    def _has_room(self, function: Function) -> bool:
        here = [*self._busy, *(each for _, each in self._idle)]
        used_gib = sum(each.memory_gib for each in here)
        return len(here) < self.gpu.workers and used_gib + function.memory_gib <= self.gpu.memory_gib
