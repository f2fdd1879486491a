"""Choice of the number of threads of a CPU engine, by trying: the least number that more threads do not beat by much.

Two numbers of threads are run alternately, so that other load on the machine affects both. The time of a run is

- on a quiet machine the wall-clock time of its fastest run, because other load only adds time
- on a busy machine an estimate from CPU time. There a run with two threads rarely has both cores at the same time. It
  would look slower than a run with one thread, which fits between the time slices of others. The estimate is the work
  of a single-threaded run divided among the threads, plus the CPU time that the threads add. It is at least the CPU
  time of the calling thread. Waiting for each other is included, because the threads spin
  (`gpufn_core.inference.ort_threads`). The longer one thread lacks a core, the longer the others spin, so here too the
  run with the least time counts
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

# The part of a run, and the time, that more threads must save: they are the whole machine's threads.
_WORTH_SHARE: Final = 0.1
_WORTH_S: Final = 50e-6
_BUSY_SHARE: Final = 0.2  # part of the time that threads wait for a core; on a quiet machine, waking takes some of that
_RACES: Final = 3  # before more threads lose: a virtual machine's core may be half as fast for seconds at a time
_LEAST_RUNS: Final = 3
_FIRST_RUNS: Final = 2  # warm-up runs, not counted
_TASKS: Final = Path("/proc/self/task")


class Run(NamedTuple):
    """The seconds of one run: wall-clock time, CPU time of the calling thread, and CPU time of all threads."""

    clock_s: float
    own_s: float
    cpu_s: float


class Race(NamedTuple):
    """The runs of two numbers of threads; `waited_s` is how long their threads were runnable without a core."""

    fewer: Sequence[Run]
    more: Sequence[Run]
    waited_s: float

    @property
    def was_disturbed(self) -> bool:
        return self.waited_s > _BUSY_SHARE * sum(run.clock_s for run in (*self.fewer, *self.more))


class Trials:
    """The least seconds of a run by number of threads, from several races. The first race must include one thread."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.were_disturbed = False
        self._work_s = math.inf  # CPU time of a run with one thread

    def judge(self, fewer: int, more: int, race: Race) -> tuple[float, float]:
        if fewer == 1:
            self._work_s = min(self._work_s, *(run.cpu_s for run in race.fewer))
        self.were_disturbed |= race.was_disturbed
        for threads, runs in ((fewer, race.fewer), (more, race.more)):
            run_s = self._run_s(threads, runs, race)
            self.seconds[threads] = min(run_s, self.seconds.get(threads, run_s))
        return self.seconds[fewer], self.seconds[more]

    def _run_s(self, threads: int, runs: Sequence[Run], race: Race) -> float:
        if not race.was_disturbed:
            return min(run.clock_s for run in runs)
        if threads == 1:
            return self._work_s
        overhead_s = max(0.0, min(run.cpu_s for run in runs) - self._work_s)
        return max(min(run.own_s for run in runs), self._work_s / threads + overhead_s)

    def notes(self) -> tuple[str, ...]:
        """Describe the trials."""
        each = tuple(
            f"{threads} {'thread' if threads == 1 else 'threads'}: {seconds * 1e3:.3g} ms"
            for threads, seconds in self.seconds.items()
        )
        return (*each, "the machine was busy, so times are estimated from CPU time") if self.were_disturbed else each


def choose_threads(cores: int, race: Callable[[int, int], tuple[float, float]]) -> int:
    """Return the least number of threads that is about as fast as more. `race` returns the least seconds of a run so
    far with each of two numbers of threads.

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
        if before_s <= _WORTH_S:  # more threads cannot save enough
            break
    return False


def run_race(
    one: Callable[[], object],
    other: Callable[[], object],
    trial_s: float,
    on_progress: Callable[[], object] = lambda: None,
) -> Race:
    """Run both alternately, for `trial_s` each. `on_progress()` is called before each pair of runs."""
    runs: tuple[list[Run], list[Run]] = ([], [])
    waited_s = 0.0
    end = time.monotonic() + 2 * trial_s
    while len(runs[1]) < _FIRST_RUNS + _LEAST_RUNS or time.monotonic() < end:
        if len(runs[1]) == _FIRST_RUNS:
            waited_s = -_waited_s()
        on_progress()
        for run, results in zip((one, other), runs, strict=True):
            results.append(_time_run(run))
    return Race(runs[0][_FIRST_RUNS:], runs[1][_FIRST_RUNS:], waited_s + _waited_s())


def _time_run(run: Callable[[], object]) -> Run:
    clock, own, cpu = time.perf_counter(), time.thread_time(), time.process_time()
    run()
    return Run(time.perf_counter() - clock, time.thread_time() - own, time.process_time() - cpu)


def _waited_s() -> float:
    """Return how long threads of this process were runnable without a core; 0 if the kernel does not count it."""
    waited_ns = 0
    for file in _TASKS.glob("*/schedstat"):
        try:
            waited_ns += int(file.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue
    return waited_ns / 1e9


def _is_worth(before_s: float, after_s: float) -> bool:
    return before_s - after_s > max(_WORTH_S, before_s * _WORTH_SHARE)
