"""Attempts whose worker is gone while nobody has said why; the clock, the agent and the links are the test's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from gpufn.invocation import OutcomeKind
from gpufn.workers import Exit
from gpufn_runtime.runner.unexplained import Unexplained

LINK: Any = SimpleNamespace(worker="w-1")
KILLED = Exit(signal=9)


class Agent:
    def __init__(self) -> None:
        self.listeners: dict[str, Callable[[Exit], None]] = {}

    def when_ended(self, worker: str, tell: Callable[[Exit], None]) -> None:
        self.listeners[worker] = tell

    def forget(self, worker: str) -> None:
        self.listeners.pop(worker, None)


class Ends:
    def __init__(self) -> None:
        self.ended: dict[Any, Exit | OutcomeKind | None] = {}

    def begin(self, attempt: Any, kind: OutcomeKind, now: float) -> None:
        attempt.ending = kind

    def with_worker(self, link: Any, attempts: Iterable[Any], exit_: Exit | None) -> None:
        for attempt in attempts:
            assert attempt.name not in self.ended
            self.ended[attempt.name] = attempt.ending or exit_


def attempt(name: str, must_end_at: float = math.inf) -> Any:
    return SimpleNamespace(name=name, must_end_at=must_end_at, ending=None)


class Lost:
    """`first` and `second` ran in a worker that is gone at 0 s."""

    def __init__(self) -> None:
        self.agent, self.ends = Agent(), Ends()
        self.unexplained = Unexplained(self.ends, self.agent, SimpleNamespace(monotonic=lambda: 0.0))
        self.first, self.second = attempt("first"), attempt("second", must_end_at=3.0)
        self.unexplained.add(LINK, [self.first, self.second])
        self.touched: list[str] = []

    def tick(self, now: float) -> bool:
        return self.unexplained.tick(now, self._touch)

    def _touch(self, attempt: Any, now: float) -> None:
        self.touched.append(attempt.name)


@pytest.fixture
def lost() -> Lost:
    return Lost()


def test_they_are_kept_until_the_agent_tells(lost: Lost) -> None:
    assert lost.tick(2.0)
    assert (lost.ends.ended, lost.touched) == ({}, ["first", "second"])
    lost.agent.listeners["w-1"](KILLED)
    assert lost.ends.ended == {"first": KILLED, "second": KILLED}
    assert not lost.tick(2.1)
    assert not lost.agent.listeners


def test_one_that_is_over_or_unwanted_waits_no_longer(lost: Lost) -> None:
    assert lost.tick(3.0)
    assert lost.ends.ended == {"second": OutcomeKind.TIMED_OUT}
    lost.first.ending = OutcomeKind.CANCELLED
    assert not lost.tick(3.1)
    assert lost.ends.ended["first"] is OutcomeKind.CANCELLED
    assert not lost.agent.listeners


def test_an_agent_that_never_tells_is_not_waited_for_for_ever(lost: Lost) -> None:
    assert not lost.tick(10.0)
    assert lost.ends.ended == {"first": None, "second": OutcomeKind.TIMED_OUT}


def test_a_worker_that_came_back_and_is_lost_again_takes_nobody_with_it(lost: Lost) -> None:
    lost.unexplained.add(LINK, [attempt("third")])
    lost.agent.listeners["w-1"](KILLED)
    assert lost.ends.ended == {"first": KILLED, "second": KILLED, "third": KILLED}


def test_with_its_assignment_it_is_over(lost: Lost) -> None:
    lost.unexplained.end("w-1", None)
    assert lost.ends.ended == {"first": None, "second": None}
    lost.unexplained.end("w-1", None)
