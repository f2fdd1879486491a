"""A web session at its gateway: the windows, and how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import BusUnavailable, WorkerLost
from gpufn_core.protocol.messages import (
    CallInput,
    InputCredit,
    InvocationMessage,
    ItemReply,
    ResultReply,
    StreamCredit,
)
from gpufn_core.protocol.streams.web_session import DOWN_WINDOW_BYTES, UP_WINDOW_BYTES, size_of
from gpufn_platform.web.pending_session import PendingSession

INBOX = "gpufn.v1.run.r"
MESSAGE = InvocationMessage("c", "site", 1, "", "", "", "gpufn.v1.rep.site.gw.c", 0.0, 60.0, stream=True)
PART = bytes(UP_WINDOW_BYTES // 2)


class Caller:
    """A caller that records the actions of the session."""

    def __init__(self) -> None:
        self.inputs: list[tuple[str, int, int]] = []
        self.credits: list[int] = []
        self.abandoned = 0

    def send_input(self, to: str, event: CallInput, payload: bytes) -> None:
        self.inputs.append((to, event.number, len(payload)))

    def give_credit(self, to: str, credit: StreamCredit) -> None:
        self.credits.append(credit.taken)

    def abandon(self, call: Any) -> None:
        self.abandoned += 1

    def forget(self, invocation: str) -> None: ...


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def session() -> tuple[PendingSession, Caller, Clock]:
    caller, clock = Caller(), Clock()
    return PendingSession(caller, MESSAGE, clock), caller, clock


def credit(taken: int, *, waits: bool = False, to: str = INBOX) -> InputCredit:
    return InputCredit("c", taken, waits, to)


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_input_waits_for_the_start_and_for_room() -> None:
    async def scenario() -> None:
        pending, caller, _ = session()
        sending = asyncio.create_task(_send(pending, 4))
        await asyncio.sleep(0)
        assert caller.inputs == []
        pending.take(credit(0), b"")
        await asyncio.sleep(0)
        assert [number for _, number, _ in caller.inputs] == [0, 1]  # the window is full
        pending.take(credit(size_of(PART)), b"")
        await asyncio.sleep(0)
        assert len(caller.inputs) == 3
        pending.take(credit(3 * size_of(PART)), b"")
        await sending
        assert caller.inputs == [(INBOX, number, len(PART)) for number in range(4)]

    run(scenario)


def test_a_sender_does_not_outlive_its_session() -> None:
    async def scenario() -> None:
        pending, caller, _ = session()
        sending = asyncio.create_task(_send(pending, 1))
        await asyncio.sleep(0)
        pending.cancel()
        await sending
        assert caller.inputs == []

    run(scenario)


def test_read_bytes_are_credited() -> None:
    async def scenario() -> None:
        pending, caller, _ = session()
        for number in range(4):
            pending.take(ItemReply("c", number, "", INBOX), bytes(DOWN_WINDOW_BYTES // 8))
        pending.take(ResultReply("c", OutcomeKind.SUCCEEDED, None, "", 1, 1, 0.0, 0.0, items=4), b"")
        assert len([payload async for payload in pending.payloads()]) == 4
        assert caller.credits == [2, 4]

    run(scenario)


@pytest.mark.parametrize("second", [credit(0, to="gpufn.v1.run.other"), ItemReply("c", 0, "", INBOX)])
def test_a_session_does_not_run_twice(second: Any) -> None:
    async def scenario() -> None:
        pending, caller, _ = session()
        pending.take(credit(0), b"")
        pending.take(ItemReply("c", 0, "", INBOX), b"a")
        pending.take(second, b"")
        assert isinstance(pending.future.exception(), WorkerLost)
        assert caller.abandoned == 1

    run(scenario)


def test_a_session_that_has_not_begun_may_start_elsewhere() -> None:
    async def scenario() -> None:
        pending, _, _ = session()
        pending.on_restart()
        assert not pending.future.done()

    run(scenario)


def test_input_that_the_bus_lost_ends_the_session() -> None:
    async def scenario() -> None:
        pending, _, clock = session()
        pending.take(credit(0), b"")
        await pending.send(b"a")
        pending.take(credit(0, waits=True), b"")  # it may still be on the way
        assert not pending.future.done()
        clock.now += 5
        pending.take(credit(0, waits=True), b"")
        assert isinstance(pending.future.exception(), BusUnavailable)

    run(scenario)


async def _send(pending: PendingSession, count: int) -> None:
    for _ in range(count):
        await pending.send(PART)
