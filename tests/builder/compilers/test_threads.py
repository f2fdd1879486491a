"""The number of threads of an engine, on a quiet machine and on a busy one."""

from __future__ import annotations

import pytest

from gpufn_builder.compilers.threads import Race, Run, Trials, choose_threads, run_race


@pytest.mark.parametrize(
    ("cores", "seconds", "chosen"),
    [
        (1, {1: 8.0}, 1),
        (4, {1: 8.0, 2: 7.9}, 1),
        (4, {1: 8.0, 2: 4.1, 4: 2.2}, 4),
        (4, {1: 8.0, 2: 4.1, 4: 4.0}, 2),
        (4, {1: 80e-6, 2: 40e-6}, 1),
        (6, {1: 8.0, 2: 4.0, 4: 2.0, 6: 1.0}, 6),
    ],
)
def test_threads_have_to_be_worth_it(cores: int, seconds: dict[int, float], chosen: int) -> None:
    run_race = []

    def race(fewer: int, more: int) -> tuple[float, float]:
        run_race.append(more)
        return seconds[fewer], seconds[more]

    assert choose_threads(cores, race) == chosen
    assert list(dict.fromkeys([1, *run_race])) == list(seconds)


def _judged(waited_s: float, fewer: list[Run], more: list[Run]) -> tuple[int, tuple[str, ...]]:
    """Choose between one and two threads; return the choice and the notes."""
    trials = Trials()
    chosen = choose_threads(2, lambda one, two: trials.judge(one, two, Race(fewer, more, waited_s)))
    return chosen, trials.notes()


# A run of 4 ms of work, with one thread and with two, which wait for each other's core on a busy machine.
ALONE = [Run(4.1e-3, 4.0e-3, 4.0e-3), Run(9.0e-3, 4.0e-3, 4.0e-3), Run(4.0e-3, 4.0e-3, 4.0e-3)]
APART = [Run(9.6e-3, 2.0e-3, 4.2e-3), Run(20e-3, 3.0e-3, 4.2e-3), Run(12e-3, 1.9e-3, 4.2e-3)]


def test_on_a_quiet_machine_the_fastest_run_by_the_clock_counts() -> None:
    assert _judged(0.1e-3, ALONE, APART) == (1, ("1 thread: 4 ms", "2 threads: 9.6 ms"))
    together = [Run(3.9e-3, 2.0e-3, 4.2e-3), Run(2.2e-3, 2.0e-3, 4.2e-3)]
    assert _judged(0.1e-3, ALONE, together) == (2, ("1 thread: 4 ms", "2 threads: 2.2 ms"))


def test_more_threads_that_lose_may_try_again() -> None:
    """One of the two cores ran at half speed for a second."""
    trials = Trials()
    slow = Race(ALONE, [Run(4.2e-3, 2.1e-3, 6.2e-3)] * 3, 0.0)
    well = Race([Run(4.4e-3, 4.4e-3, 4.4e-3)] * 3, [Run(2.3e-3, 2.2e-3, 4.4e-3)] * 3, 0.0)
    races = iter([slow, well])
    assert choose_threads(2, lambda one, two: trials.judge(one, two, next(races))) == 2
    assert trials.notes() == ("1 thread: 4 ms", "2 threads: 2.3 ms")


def test_on_a_busy_machine_threads_that_share_the_work_are_not_blamed_for_waiting() -> None:
    threads, (one, two, hint) = _judged(40e-3, ALONE, APART)
    assert (threads, one, two) == (2, "1 thread: 4 ms", "2 threads: 2.2 ms")
    assert "busy" in hint


def test_on_a_busy_machine_threads_that_spin_while_they_wait_are_not_blamed_for_it_twice() -> None:
    """An encoder of 1.5 ms with one thread and 1.0 ms with two, while another process occupies a core."""
    assert _judged(40e-3, [Run(1.5e-3, 1.87e-3, 1.87e-3)] * 3, [Run(1.39e-3, 0.7e-3, 2.5e-3)] * 3)[0] == 2


def test_on_a_busy_machine_spinning_threads_without_a_core_are_no_cost_of_sharing() -> None:
    """ResNet-18 of 26.9 ms. Two threads use 28 ms of CPU time, or 43 ms if one of them has to wait."""
    alone = [Run(26.9e-3, 26.9e-3, 26.9e-3)] * 3
    kept_waiting = [Run(29e-3, 16e-3, 43e-3), Run(18e-3, 14.2e-3, 28e-3), Run(29e-3, 16e-3, 43e-3)]
    assert _judged(40e-3, alone, kept_waiting)[0] == 2


@pytest.mark.parametrize(
    ("own_s", "cpu_s"),
    [
        (3.9e-3, 4.0e-3),  # the calling thread does all the work
        (2.0e-3, 6.0e-3),  # sharing the work costs as much as it saves
    ],
)
def test_on_a_busy_machine_as_well_threads_have_to_be_worth_it(own_s: float, cpu_s: float) -> None:
    assert _judged(40e-3, ALONE, [Run(9.6e-3, own_s, cpu_s)] * 3)[0] == 1


def test_the_first_runs_of_each_do_not_count() -> None:
    ran: list[str] = []
    race = run_race(lambda: ran.append("one"), lambda: ran.append("other"), trial_s=0.0)
    assert ran == ["one", "other"] * 5
    assert (len(race.fewer), len(race.more)) == (3, 3)
    assert all(run.clock_s >= 0 and run.own_s >= 0 and run.cpu_s >= 0 for run in (*race.fewer, *race.more))
    assert race.waited_s >= 0
