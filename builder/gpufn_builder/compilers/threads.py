"""How many threads an engine runs with on a CPU: the fewest that more of them do not beat by much. Found by trying.

Two numbers of threads take turns, so that what else the machine does meets both. What a run takes is

- on a quiet machine the fastest of its runs by the clock: what else happens only adds
- where others have the cores, what its CPU time comes to. A run with two threads then hardly ever has both cores at
  once, and would look slower than one with a single thread, which fits between the others' turns. So: the work spread
  evenly, with all that the spreading costs on top, and no less than the calling thread did itself. That they wait for
  one another is in it, for they spin (gpufn_core.inference.ort_threads); the longer one is without a core the longer the other spins,
  so here too the run with the least counts
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

# What more threads are to save of a run: they are the whole machine's.
_WORTH_SHARE: Final = 0.1
_WORTH_S: Final = 50e-6
_BUSY_SHARE: Final = 0.2  # of the time: so long its threads wait for a core. On a quiet machine they take some to wake
_RACES: Final = 3  # before more threads have lost: for seconds at a time a virtual machine's core may be half as fast
_LEAST_RUNS: Final = 3
_FIRST_RUNS: Final = 2  # slower, and not counted
_TASKS: Final = Path("/proc/self/task")


class Run(NamedTuple):
    """Seconds of one run: by the clock, of CPU time of the thread that called it, and of all threads."""

    clock_s: float
    own_s: float
    cpu_s: float


class Race(NamedTuple):
    """The runs of two numbers of threads; `waited_s` is how long their threads wanted a core and had none."""

    fewer: Sequence[Run]
    more: Sequence[Run]
    waited_s: float

    @property
    def was_disturbed(self) -> bool:
        return self.waited_s > _BUSY_SHARE * sum(run.clock_s for run in (*self.fewer, *self.more))


class Trials:
    """The least seconds of a run with so many threads, from races; the first has to be with one."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.were_disturbed = False
        self._work_s = math.inf  # CPU time of a run with one thread

    def judge(self, fewer: int, more: int, race: Race) -> tuple[float, float]:
        if fewer == 1:
            self._work_s = min(self._work_s, *(run.cpu_s for run in race.fewer))
        self.were_disturbed |= race.was_disturbed
        for threads, runs in ((fewer, race.fewer), (more, race.more)):
            taken = self._taken(threads, runs, race)
            self.seconds[threads] = min(taken, self.seconds.get(threads, taken))
        return self.seconds[fewer], self.seconds[more]

    def _taken(self, threads: int, runs: Sequence[Run], race: Race) -> float:
        if not race.was_disturbed:
            return min(run.clock_s for run in runs)
        if threads == 1:
            return self._work_s
        spreading_s = max(0.0, min(run.cpu_s for run in runs) - self._work_s)
        return max(min(run.own_s for run in runs), self._work_s / threads + spreading_s)

    def notes(self) -> tuple[str, ...]:
        """What was tried, in words."""
        each = tuple(
            f"{threads} {'thread' if threads == 1 else 'threads'}: {seconds * 1e3:.3g} ms"
            for threads, seconds in self.seconds.items()
        )
        return (*each, "the machine was busy, so reckoned from CPU time") if self.were_disturbed else each


def choose_threads(cores: int, race: Callable[[int, int], tuple[float, float]]) -> int:
    """The least number of threads that is about as quick as more. `race` has the seconds of a run with each of two, the
    least that were seen.

    >>> choose_threads(4, lambda fewer, more: (8 / fewer, max(8 / more, 3.9)))
    2
    """
    best = 1
    for threads in sorted({count for count in (2, 4, 8, 16, 32, cores) if 1 < count <= cores}):
        if not _wins(functools.partial(race, best, threads)):
            break
        best = threads
    return best


def _wins(race: Callable[[], tuple[float, float]]) -> bool:
    for _ in range(_RACES):
        before_s, after_s = race()
        if _is_worth(before_s, after_s):
            return True
        if before_s <= _WORTH_S:  # whatever the next one would say
            break
    return False


def raced(one: Callable[[], None], other: Callable[[], None], trial_s: float) -> Race:
    """Both run in turns, `trial_s` each."""
    taken: tuple[list[Run], list[Run]] = ([], [])
    waited_s = 0.0
    end = time.monotonic() + 2 * trial_s
    while len(taken[1]) < _FIRST_RUNS + _LEAST_RUNS or time.monotonic() < end:
        if len(taken[1]) == _FIRST_RUNS:
            waited_s = -_waited_s()
        for run, its in zip((one, other), taken, strict=True):
            its.append(_timed(run))
    return Race(taken[0][_FIRST_RUNS:], taken[1][_FIRST_RUNS:], waited_s + _waited_s())


def _timed(run: Callable[[], None]) -> Run:
    clock, own, cpu = time.perf_counter(), time.thread_time(), time.process_time()
    run()
    return Run(time.perf_counter() - clock, time.thread_time() - own, time.process_time() - cpu)


def _waited_s() -> float:
    """How long this process's threads have wanted a core and had none; 0 where the kernel does not count it."""
    waited_ns = 0
    for file in _TASKS.glob("*/schedstat"):
        try:
            waited_ns += int(file.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return waited_ns / 1e9


def _is_worth(before_s: float, after_s: float) -> bool:
    return before_s - after_s > max(_WORTH_S, before_s * _WORTH_SHARE)
