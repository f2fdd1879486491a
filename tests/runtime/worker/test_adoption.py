"""Leftovers of a worker for its next runner: as a table, and with a real worker."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.protocol.frames import Answer, Cancel, Ready, Run, Verb
from gpufn_platform.shared_bodies.bodies import SharedBodies
from gpufn_runtime.worker.execute.attempts import Attempt, Attempts
from gpufn_runtime.worker.platform_calls.pending_requests import PendingRequests

Start = Any

_WAITS = """
import asyncio, os, pathlib, time
def f(began: str, until: str):
    pathlib.Path(began).touch()
    while not os.path.exists(until):
        time.sleep(0.002)
    pathlib.Path(until + "-seen").touch()
    return "ended"
async def g(began: str, until: str):
    pathlib.Path(began).touch()
    while not os.path.exists(until):
        await asyncio.sleep(0.002)
    pathlib.Path(until + "-seen").touch()
    return "ended"
"""


def given(*, is_begun: bool = True, **run: Any) -> tuple[Attempts, Attempt]:
    attempts = Attempts(SharedBodies("/nowhere"))
    fields = {"method": "", "content_type": "", "accept": "", "delivery": "there", **run}
    attempt = attempts.add(Run(1, "i1", **fields), b"", 1)
    if is_begun:
        attempts.start(attempt)
    return attempts, attempt


def named(attempts: Attempts) -> tuple[int, list[int]]:
    stale, unfinished = attempts.leftovers()
    return stale, [each.attempt for each in unfinished]


def test_calls_that_run_when_the_runner_disconnects_are_for_the_next_one() -> None:
    attempts, attempt = given()
    attempts.abandon(set())
    assert named(attempts) == (0, [1])
    assert not attempt.cancel_requested
    assert attempts.resume(2) == []
    assert (attempt.link, attempts.end(attempt, b"result")) == (2, True)
    assert attempts.idle


def test_an_undelivered_result_is_kept_for_the_next_runner() -> None:
    attempts, attempt = given()
    attempts.abandon(set())
    assert not attempts.end(attempt, b"result")
    assert (attempts.idle, named(attempts)) == (True, (0, [1]))
    attempts.abandon(set())  # that runner died before it was sent
    assert named(attempts) == (0, [1])
    assert attempts.resume(3) == [b"result"]
    assert named(attempts) == (0, [])


def test_a_result_sent_without_a_reader_is_kept_as_well() -> None:
    attempts, attempt = given()
    assert attempts.end(attempt, b"result")
    attempts.keep(attempt, b"result")
    attempts.abandon(set())
    assert named(attempts) == (0, [1])
    assert attempts.resume(2) == [b"result"]


def test_a_result_is_dropped_that_the_next_runner_does_not_know() -> None:
    attempts, attempt = given()
    assert attempts.end(attempt, b"result")
    attempts.abandon(set())
    assert named(attempts) == (0, [])
    attempts.keep(attempt, b"result")
    assert attempts.resume(2) == []


@pytest.mark.parametrize("run", [{"stream": True}, {"delivery": ""}])
def test_a_stream_and_calls_of_the_fast_path_are_not_for_the_next_runner(run: dict[str, Any]) -> None:
    attempts, attempt = given(**run)
    attempts.abandon(set())
    assert named(attempts) == (1, [])
    assert attempt.cancel_requested


def test_a_cancelled_call_is_not_for_the_next_runner() -> None:
    attempts, _ = given()
    attempts.cancel(1)
    attempts.abandon(set())
    assert named(attempts) == (1, [])


@pytest.mark.parametrize("is_known_whose", [True, False])
def test_a_call_that_lost_an_answer_is_not_for_the_next_runner(*, is_known_whose: bool) -> None:
    attempts, attempt = given()
    attempts.abandon({attempt if is_known_whose else None})
    assert named(attempts) == (1, [])
    freed = Mock()
    attempts.on_stale_end = freed
    assert not attempts.end(attempt, b"result")
    freed.assert_called_once_with()


def test_a_call_that_has_not_begun_is_not_for_the_next_runner() -> None:
    attempts, attempt = given(is_begun=False)
    attempts.abandon(set())
    assert named(attempts) == (0, [])
    assert not attempts.start(attempt)


def test_requests_without_a_runner_are_sent_to_the_next_one(tmp_path: Path) -> None:
    gone, back = threading.Event(), threading.Event()

    def wait() -> None:
        gone.set()
        back.wait()
        link.number = 2

    link = Mock(number=1, is_forked_child=False, has_peer=Mock(wait=wait))
    requests, answers = PendingRequests(link, SharedBodies(tmp_path)), []
    thread = threading.Thread(target=lambda: answers.append(requests.request(Verb.STATUS, "i")))
    thread.start()
    gone.wait()
    assert not link.send.called
    back.set()
    while not link.send.called:
        time.sleep(0.001)
    assert link.send.call_args.kwargs == {"link": 2}
    requests.deliver(Answer(1, OutcomeKind.SUCCEEDED, None, "text/plain"), b"queued")
    thread.join()
    assert answers == [("text/plain", b"queued")]


@pytest.mark.parametrize("ends_without_a_runner", [False, True])
@pytest.mark.parametrize(("qualname", "kind"), [("f", "sync"), ("g", "async")])
def test_the_next_runner_receives_the_end_of_the_call(
    start: Start, tmp_path: Path, qualname: str, kind: str, *, ends_without_a_runner: bool
) -> None:
    worker = start(_WAITS, qualname=qualname, kind=kind)
    began, until = tmp_path / "began", tmp_path / "until"
    number = worker.run(f'{{"began": "{began}", "until": "{until}"}}'.encode(), delivery="there")
    while not began.exists():
        time.sleep(0.001)
    worker.hang_up()
    if ends_without_a_runner:
        until.touch()
        while not until.with_name("until-seen").exists():
            time.sleep(0.001)
    worker.listen()
    hello = worker.accept()
    assert hello.running == 0
    assert [(each.attempt, each.invocation, each.delivery) for each in hello.unfinished] == [(number, "i1", "there")]
    assert hello.unfinished[0].ran_s > 0
    assert isinstance(worker.next()[0], Ready)
    until.touch()
    result, body = worker.result()
    assert (result.attempt, result.kind.value, body) == (number, "succeeded", b'"ended"')
    assert worker.freed == 0


def test_the_next_runner_can_stop_it(start: Start, tmp_path: Path) -> None:
    worker = start(_WAITS, qualname="g", kind="async")
    began = tmp_path / "began"
    number = worker.run(f'{{"began": "{began}", "until": "/never"}}'.encode(), delivery="there")
    while not began.exists():
        time.sleep(0.001)
    worker.hang_up()
    worker.listen()
    worker.ready()
    worker.send(Cancel(number))
    assert worker.result()[0].kind.value == "cancelled"
