"""Attempts of a lost worker before its exit is reported. Clock, agent and links are fakes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.domain.worker import Exit
from gpufn_core.spec.function_spec import Retry
from gpufn_runtime.runner.recovery.awaiting_exit import AwaitingExit

LINK: Any = SimpleNamespace(worker="w-1", revision=SimpleNamespace(spec=SimpleNamespace(retries=None)))
RETRIED: Any = SimpleNamespace(worker="w-2", revision=SimpleNamespace(spec=SimpleNamespace(retries=Retry(1))))
KILLED = Exit(signal=9)
UNKNOWN = None


class Agent:
    def __init__(self) -> None:
        self.listeners: dict[str, Callable[[Exit], None]] = {}
        self.told: dict[str, Exit] = {}

    def tell(self, worker: str, end: Exit) -> None:
        self.told[worker] = end
        self.listeners.pop(worker)(end)

    def exit_of(self, worker: str) -> Exit | None:
        return self.told.get(worker)

    def on_exit(self, worker: str, tell: Callable[[Exit], None]) -> None:
        self.listeners[worker] = tell

    def forget(self, worker: str) -> None:
        self.listeners.pop(worker, None)


class AttemptFinisher:
    def __init__(self) -> None:
        self.ended: dict[str, Exit | OutcomeKind | None] = {}

    def with_worker(self, link: Any, attempts: Iterable[Any], exit_: Exit | None) -> None:
        for attempt in attempts:
            assert attempt.name not in self.ended
            self.ended[attempt.name] = attempt.run.ending or exit_


def attempt(name: str, must_end_at: float = math.inf, link: Any = LINK) -> Any:
    return SimpleNamespace(
        name=name, link=link, is_cancelled=False, run=SimpleNamespace(must_end_at=must_end_at, ending=None)
    )


class Lost:
    """`first` and `second` ran in a worker that was lost at 0 s."""

    def __init__(self) -> None:
        self.agent, self.finisher = Agent(), AttemptFinisher()
        self.awaiting_exit = AwaitingExit(self.finisher, self.agent, SimpleNamespace(monotonic=lambda: 0.0))
        self.first, self.second = attempt("first"), attempt("second", must_end_at=3.0)
        self.awaiting_exit.add(LINK, [self.first, self.second], 10.0)
        self.touched: list[str] = []

    def tick(self, now: float) -> bool:
        return self.awaiting_exit.tick(now, self._touch)

    def _touch(self, attempt: Any, now: float) -> None:
        self.touched.append(attempt.name)


@pytest.fixture
def lost() -> Lost:
    return Lost()


def test_they_are_kept_until_the_agent_tells(lost: Lost) -> None:
    assert lost.tick(2.0)
    assert (lost.finisher.ended, lost.touched) == ({}, ["first", "second"])
    assert list(lost.awaiting_exit) == [lost.first, lost.second]
    lost.agent.tell("w-1", KILLED)
    assert lost.finisher.ended == {"first": KILLED, "second": KILLED}
    assert not lost.tick(2.1)


def test_one_that_is_over_or_unwanted_waits_no_longer(lost: Lost) -> None:
    assert lost.tick(3.0)
    assert lost.finisher.ended == {"second": UNKNOWN}
    lost.first.is_cancelled, lost.first.run.ending = True, OutcomeKind.CANCELLED
    assert not lost.tick(3.1)
    assert lost.finisher.ended["first"] is OutcomeKind.CANCELLED
    assert not lost.agent.listeners


def test_one_that_starts_again_waits_for_the_death_of_its_process(lost: Lost) -> None:
    late, timed_out = attempt("late", 3.0, RETRIED), attempt("timed out", 3.0, RETRIED)
    timed_out.run.ending = OutcomeKind.TIMED_OUT
    unwanted = attempt("unwanted", 3.0, RETRIED)
    unwanted.is_cancelled, unwanted.run.ending = True, OutcomeKind.CANCELLED
    lost.awaiting_exit.add(RETRIED, [late, timed_out, unwanted], 60.0)
    assert lost.tick(59.9)
    assert lost.finisher.ended == {"first": UNKNOWN, "second": UNKNOWN, "unwanted": OutcomeKind.CANCELLED}
    assert list(lost.awaiting_exit) == [late, timed_out]
    lost.agent.tell("w-2", KILLED)
    assert (lost.finisher.ended["late"], lost.finisher.ended["timed out"]) == (KILLED, OutcomeKind.TIMED_OUT)


def test_an_agent_that_never_tells_is_not_waited_for_for_ever(lost: Lost) -> None:
    assert lost.tick(9.9)
    assert not lost.tick(10.0)
    assert lost.finisher.ended == {"first": UNKNOWN, "second": UNKNOWN}


def test_a_runner_that_stops_leaves_what_nobody_has_explained(lost: Lost) -> None:
    lost.awaiting_exit.drop_all()
    lost.awaiting_exit.end("w-1")
    assert lost.finisher.ended == {}
