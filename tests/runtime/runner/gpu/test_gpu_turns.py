"""Turns on one GPU, with a fake clock and timer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufn_core.domain.devices.device import DeviceShare, Share
from gpufn_platform.process.clock import SystemClock
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.gpu.gpu_turns import NodeTurns, Seat


class Gpu(SystemClock):
    """GPU shared by functions "f", "g" and others. Attempts are names; `began` lists those that began."""

    def __init__(self, at_once: int = 1) -> None:
        self.now = 100.0
        self.timer_at = math.inf
        self.began: list[str] = []
        self._on_timer: Callable[[], None] = lambda: None
        self._turns = NodeTurns(self, at_once, self._call_later)

    def monotonic(self) -> float:
        return self.now

    def cancel(self) -> None:
        self.timer_at = math.inf

    def _call_later(self, delay_s: float, do: Callable[[], None]) -> Gpu:
        self.timer_at, self._on_timer = self.now + delay_s, do
        return self

    def later(self, seconds: float) -> None:
        """Advance the clock, and fire the timer when it is due."""
        until = self.now + seconds
        while self.timer_at <= until:
            self.now, self.timer_at = self.timer_at, math.inf
            self._on_timer()
        self.now = until

    def seat(self, function: str, mode: Share = Share.TIME, gpu: str = "GPU-0") -> Seat:
        share = DeviceShare(cpu_device="cpu", cores=0.1, memory_bytes=1 << 20, gpus=(gpu,), mode=mode)
        seat = self._turns.seat(function, share)
        assert seat is not None
        seat.join()
        return seat

    def request(self, seat: Seat, name: str) -> Any:
        attempt = cast("Attempt", name)
        seat.request(attempt, lambda: self.began.append(name))
        return attempt


@pytest.mark.parametrize("mode", [Share.EXCLUSIVE, Share.MPS])
def test_a_worker_with_a_gpu_or_a_part_of_its_own_has_no_seat(mode: Share) -> None:
    share = DeviceShare(cpu_device="cpu", cores=0.1, memory_bytes=1 << 20, gpus=("GPU-0",), mode=mode)
    assert Gpu()._turns.seat("f", share) is None


def test_workers_of_one_function_do_not_wait_for_each_other() -> None:
    gpu = Gpu()
    first, second = gpu.seat("f"), gpu.seat("f")
    gpu.request(first, "f1")
    gpu.request(second, "f2")
    assert (gpu.began, gpu.timer_at) == (["f1", "f2"], math.inf)


def test_functions_on_different_gpus_do_not_wait_for_each_other() -> None:
    gpu = Gpu()
    gpu.request(gpu.seat("f"), "f1")
    gpu.request(gpu.seat("g", gpu="GPU-1"), "g1")
    assert gpu.began == ["f1", "g1"]


def test_no_turns_are_needed_where_all_have_one() -> None:
    gpu = Gpu(at_once=2)
    f, g = gpu.seat("f"), gpu.seat("g")
    assert (f.must_take_turns, g.must_take_turns) == (False, False)
    gpu.seat("g")
    assert (f.must_take_turns, g.must_take_turns) == (True, True)


def test_another_function_waits_until_the_turn_has_ended() -> None:
    gpu = Gpu()
    f, g = gpu.seat("f"), gpu.seat("g")
    first = gpu.request(f, "f1")
    gpu.request(g, "g1")
    assert (gpu.began, g.waits_on, f.waits_on) == (["f1"], "GPU-0", "")
    gpu.later(1.0)
    f.done(first)
    gpu.later(1.0)
    assert (gpu.began, g.waits_on) == (["f1", "g1"], "")


def test_only_the_configured_number_of_turns_is_active() -> None:
    gpu = Gpu(at_once=2)
    seats = [gpu.seat(name) for name in "fgh"]
    attempts = [gpu.request(seat, seat.function) for seat in seats]
    assert gpu.began == ["f", "g"]
    seats[1].done(attempts[1])
    gpu.later(1.0)
    assert gpu.began == ["f", "g", "h"]


def test_the_next_call_of_the_same_worker_finds_its_turn_kept_for_a_moment() -> None:
    gpu = Gpu()
    f, g = gpu.seat("f"), gpu.seat("g")
    first = gpu.request(f, "f1")
    gpu.request(g, "g1")
    gpu.later(0.05)
    f.done(first)
    gpu.later(0.002)
    second = gpu.request(f, "f2")
    assert gpu.began == ["f1", "f2"]
    gpu.later(0.05)
    f.done(second)
    gpu.later(0.1)
    assert gpu.began == ["f1", "f2", "g1"]


def test_one_worker_begins_as_many_of_its_calls_in_its_turn_as_it_has_slots_until_others_have_a_better_claim() -> None:
    gpu = Gpu()
    f, g = gpu.seat("f"), gpu.seat("g")
    attempts = [gpu.request(f, f"f{n}") for n in (1, 2)]
    gpu.request(g, "g1")
    attempts.append(gpu.request(f, "f3"))
    assert gpu.began == ["f1", "f2", "f3"]
    gpu.later(1.0)
    gpu.request(f, "f4")
    assert gpu.began == ["f1", "f2", "f3"]
    for attempt in attempts:
        f.done(attempt)
    assert gpu.began == ["f1", "f2", "f3", "g1"]


def test_calls_that_others_kept_from_a_turn_begin_when_those_no_longer_wait() -> None:
    gpu = Gpu()
    f, g = gpu.seat("f"), gpu.seat("g")
    gpu.request(f, "f1")
    gpu.later(1.0)
    other = gpu.request(g, "g1")
    gpu.request(f, "f2")
    assert gpu.began == ["f1"]
    g.done(other)
    assert gpu.began == ["f1", "f2"]


def test_a_long_turn_is_passed_on_and_running_calls_continue() -> None:
    gpu = Gpu()
    f, g = gpu.seat("f"), gpu.seat("g")
    lasting = gpu.request(f, "f1")
    gpu.request(g, "g1")
    gpu.later(9.9)
    assert gpu.began == ["f1"]
    gpu.later(0.2)
    assert gpu.began == ["f1", "g1"]
    gpu.request(f, "f2")
    f.done(lasting)  # has no turn to end any longer
    assert gpu.began == ["f1", "g1"]
    assert f.waits_on == "GPU-0"


def test_a_turn_that_is_no_longer_needed_is_passed_on_once() -> None:
    """A call that calls functions passes its turn on."""
    gpu = Gpu()
    f, g, h = (gpu.seat(name) for name in "fgh")
    first = gpu.request(f, "f1")
    gpu.request(g, "g1")
    gpu.request(h, "h1")
    gpu.later(1.0)
    f.done(first)
    gpu.later(0.1)
    f.done(first)
    gpu.later(0.1)
    assert gpu.began == ["f1", "g1"]


def test_a_call_that_no_longer_waits_does_not_begin() -> None:
    gpu = Gpu()
    f, g = gpu.seat("f"), gpu.seat("g")
    first = gpu.request(f, "f1")
    gone = gpu.request(g, "g1")
    gpu.request(g, "g2")
    g.done(gone)
    f.done(first)
    gpu.later(1.0)
    assert gpu.began == ["f1", "g2"]


def test_calls_that_wait_at_an_ending_worker_do_not_begin_there_although_a_turn_is_free() -> None:
    gpu = Gpu()
    f, g = gpu.seat("f"), gpu.seat("g")
    first = gpu.request(f, "f1")
    waiting = [gpu.request(g, "g1"), gpu.request(g, "g2")]
    gpu.later(0.1)
    f.done(first)
    assert gpu.began == ["f1"]  # the turn is kept for f's next call
    gpu.now += 1.0  # no longer, although the timer is late
    assert g.remove_waiting() == waiting
    g.leave()
    assert gpu.began == ["f1"]
    gpu.request(f, "f2")
    assert gpu.began == ["f1", "f2"]


def test_a_worker_that_ends_releases_its_turn_and_the_last_function_does_not_wait() -> None:
    gpu = Gpu()
    f, g, h = (gpu.seat(name) for name in "fgh")
    gpu.request(f, "f1")
    gpu.request(g, "g1")
    f.leave()
    f.leave()
    assert gpu.began == ["f1", "g1"]
    for name in ("h1", "h2"):
        gpu.request(h, name)
    assert gpu.began == ["f1", "g1"]
    g.leave()
    assert gpu.began == ["f1", "g1", "h1", "h2"]
    assert h.waits_on == ""


def test_time_is_shared_alike_between_short_calls_and_long_ones() -> None:
    gpu = Gpu()
    seats = {"f": gpu.seat("f"), "g": gpu.seat("g")}
    call_s = {"f": 0.05, "g": 1.0}
    seconds = {"f": 0.0, "g": 0.0}
    for name, seat in seats.items():
        gpu.request(seat, name)
    for _ in range(2000):
        name = gpu.began[-1]
        gpu.later(call_s[name])
        seconds[name] += call_s[name]
        seats[name].done(cast("Attempt", name))
        gpu.later(0.001)  # its next delivery is under way
        gpu.request(seats[name], name)
    assert seconds["f"] == pytest.approx(seconds["g"], rel=0.05)


@settings(max_examples=150)
@given(st.integers(1, 2), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.floats(0.001, 3.0)), max_size=60))
def test_every_attempt_begins_once_unless_it_left_and_the_number_of_turns_is_kept(
    at_once: int, events: list[tuple[int, int, float]]
) -> None:
    """Four workers of three functions. Events: a call requests a turn or ends, a worker leaves or joins, or
    time passes."""
    gpu = Gpu(at_once)
    seats = [gpu.seat(function) for function in "ffgh"]
    asked: dict[Any, Seat] = {}  # and not done
    expected: set[str] = set()
    for number, (kind, place, seconds) in enumerate(events):
        seat = seats[place]
        if kind <= 2:
            name = f"{number}"
            expected.add(name)
            asked[gpu.request(seat, name)] = seat
        elif kind == 3 and (mine := [attempt for attempt, its in asked.items() if its is seat]):
            if mine[0] in seat.waiting:
                expected.discard(str(mine[0]))
            asked.pop(mine[0]).done(mine[0])
        elif kind == 4:
            for attempt in list(seat.waiting):  # like a queue that hands them back
                expected.discard(str(attempt))
                asked.pop(attempt).done(attempt)
            seat.leave()
            seat.join()
        else:
            gpu.later(seconds)
        assert sum(each.turn is not None for each in seats) <= at_once
    for _ in range(200):
        for attempt, seat in list(asked.items()):
            if attempt not in seat.waiting:
                asked.pop(attempt).done(attempt)
        gpu.later(0.05)
    assert sorted(gpu.began) == sorted(expected)
