"""The life of submitted calls as a state machine: submit, attempts, ends, cancels, and a crash after any write.

The machine keeps a model of all results that callers received. The bus has to agree with the model after every step,
and after the recovery from every crash.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Coroutine
from typing import Any

import hypothesis
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.domain.revision import Revision
from gpufn_core.errors import IdempotencyMismatch
from gpufn_core.ids import digest_of, new_invocation_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.protocol.records import CallRecord
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue import queue_position, queued_calls
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.records import call_records, dead_letters

FUNCTION = "lives"
QUEUE = subjects.async_queue(FUNCTION, 1)
ENDS = (InvocationState.SUCCEEDED, InvocationState.FAILED, InvocationState.TIMED_OUT)
SPEC = FunctionSpec(name=FUNCTION, entry=EntryPoint("m", "f"), methods=(MethodSpec(),))
REVISION = Revision(function=FUNCTION, number=1, spec=SPEC, bundle=digest_of(b""), created_at=0.0)


class Known(msgspec.Struct):
    """The caller's knowledge of a call."""

    body: bytes
    end: InvocationState | None = None
    attempt: int = 1


async def submit(bus: Bus, invocation: str | None, body: bytes) -> CallRecord:
    request = CallRequest(REVISION, "", "application/json", body, accept="", deadline=0.0)
    return await call_records.submit(bus, request, now=1.0, invocation=invocation)


class Life(RuleBasedStateMachine):
    calls: Bundle[str] = Bundle("calls")
    held: Bundle[tuple[str, int]] = Bundle("held")  # deliveries that a runner holds: invocation, sequence

    def __init__(self, url: str) -> None:
        super().__init__()
        self._runner = asyncio.Runner()
        self._bus = self._do(Bus.connect(url, name="life"))
        self._do(self._begin())
        self._known: dict[str, Known] = {}

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    async def _begin(self) -> None:
        await streams.ensure_streams(self._bus)
        for stream in (subjects.ASYNC, subjects.RESULTS, subjects.DEAD_LETTERS):
            await streams.purge(self._bus, stream, ">")

    def teardown(self) -> None:
        self._do(self._made_up_for())
        self._do(self._bus.close())
        self._runner.close()

    # --- clients ------------------------------------------------------------------------------------------------------

    async def _submit(self, invocation: str | None, body: bytes) -> CallRecord:
        return await submit(self._bus, invocation, body)

    @rule(target=calls, body=st.binary(max_size=3), own_id=st.booleans())
    def submit(self, body: bytes, own_id: bool) -> str:
        record: CallRecord = self._do(self._submit(new_invocation_id() if own_id else None, body))
        assert record.state is InvocationState.QUEUED
        self._known[record.id] = Known(body)
        return record.id

    @rule(invocation=calls)
    def submit_again(self, invocation: str) -> None:
        record = self._do(self._submit(invocation, self._known[invocation].body))
        assert record.state is (self._known[invocation].end or InvocationState.QUEUED)

    @rule(invocation=calls)
    def submit_something_else(self, invocation: str) -> None:
        try:
            self._do(self._submit(invocation, self._known[invocation].body + b"else"))
        except IdempotencyMismatch:
            return
        raise AssertionError("another body was taken")

    @rule(invocation=calls, twice=st.booleans())
    def cancel(self, invocation: str, twice: bool) -> None:
        known = self._known[invocation]
        record = self._do(call_records.read(self._bus, invocation))[0]
        for _ in range(2 if twice else 1):
            assert self._do(call_records.cancel(self._bus, record, 2.0)) is (known.end is None)
            known.end = known.end or InvocationState.CANCELLED

    # --- runners ------------------------------------------------------------------------------------------------------

    @rule(target=held, which=st.integers(0, 9))
    def take(self, which: int) -> Any:
        """Take any message of the queue; after a crash, another runner may have had it before."""
        found = self._do(queue_position.queued(self._bus, subjects.ASYNC, QUEUE, 1))
        if not found:
            return multiple()
        seq, message = found[which % len(found)]
        return message.id, seq

    @rule(delivery=consumes(held), state=st.sampled_from(ENDS), dies_after=st.sampled_from(["record", "letter", "ack"]))
    def end(self, delivery: tuple[str, int], state: InvocationState, dies_after: str) -> None:
        invocation, seq = delivery
        message, body = self._do(self._message(seq)) or (None, b"")
        if message is None:
            return  # cancelled, or another runner has settled it
        known = self._known[invocation]
        record = CallRecord(
            id=invocation, function=FUNCTION, revision=1, state=state, submitted_at=1.0, ended_at=3.0,
            attempt=message.attempt, digest=message.digest, queue_seq=seq,
        )  # fmt: skip
        assert self._do(call_records.end(self._bus, record)) is (known.end is None)
        known.end = known.end or state
        if dies_after == "record":
            return
        ended = self._do(call_records.read(self._bus, invocation))[0]
        self._do(dead_letters.store(self._bus, ended, message, body))
        if dies_after == "ack":
            self._do(streams.delete_message(self._bus, subjects.ASYNC, seq))

    @rule(delivery=consumes(held), dies_after=st.sampled_from(["message", "record", "ack"]))
    def retry(self, delivery: tuple[str, int], dies_after: str) -> None:
        invocation, seq = delivery
        message, body = self._do(self._message(seq)) or (None, b"")
        known = self._known[invocation]
        if message is None or (message.attempt > 1 and known.end is not None):
            return  # a runner reads the record before a second attempt
        again = msgspec.structs.replace(message, attempt=message.attempt + 1)
        msg_id = f"{invocation}.{again.attempt}"
        stored = self._do(self._bus.publish_stored(QUEUE, pack(again, body), msg_id=msg_id))
        if dies_after == "message":
            return
        self._do(call_records.retry(self._bus, again, body, stored.seq))
        assert known.end is None or self._do(self._message(stored.seq)) is None
        if dies_after == "ack":
            self._do(streams.delete_message(self._bus, subjects.ASYNC, seq))

    async def _message(self, seq: int) -> tuple[InvocationMessage, bytes] | None:
        stored = await streams.next_message(self._bus, subjects.ASYNC, QUEUE, seq)
        return None if stored is None or stored.seq != seq else queued_calls.unpack(stored.payload, seq)

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_first_end_stays(self) -> None:
        for invocation, known in self._known.items():
            record = self._do(call_records.read(self._bus, invocation))[0]
            assert record.state is (known.end or InvocationState.QUEUED)
            assert record.digest == call_records.request_digest(FUNCTION, "", known.body)

    @invariant()
    def nothing_that_has_not_ended_is_lost(self) -> None:
        stored = self._do(queue_position.queued(self._bus, subjects.ASYNC, QUEUE, 1, 1000))
        waiting = {invocation for invocation, known in self._known.items() if known.end is None}
        assert waiting <= {message.id for _, message in stored}

    async def _made_up_for(self) -> None:
        """By the reaper, or by the redelivery."""
        for seq, message in await queue_position.queued(self._bus, subjects.ASYNC, QUEUE, 1, 1000):
            assert await queue_position.remove_ended_call(self._bus, seq, message) is (
                self._known[message.id].end is not None
            )
        stored = await queue_position.queued(self._bus, subjects.ASYNC, QUEUE, 1, 1000)
        waiting = {invocation for invocation, known in self._known.items() if known.end is None}
        assert {message.id for _, message in stored} == waiting
        letters = {letter.id for letter in await dead_letters.recent(self._bus, FUNCTION, 1000)}
        assert letters == {
            invocation for invocation, known in self._known.items() if known.end and known.end.leaves_dead_letter
        }


def test_every_life_of_a_call_has_one_end(nats: EmbeddedServer) -> None:
    machine: Any = functools.partial(Life, nats.url)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=25,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=(hypothesis.Phase.generate,),  # report a failure at once: shrinking takes minutes on a bus
            database=None,
        ),
    )


async def test_a_retry_of_a_call_that_failed_meanwhile_keeps_its_missing_dead_letter(
    connect: Any, nats: EmbeddedServer
) -> None:
    """The runner died between record and dead letter; the message is redelivered, and this time its attempt fails
    otherwise."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    record = await submit(bus, None, b"{}")
    stored = await streams.next_message(bus, subjects.ASYNC, QUEUE, record.queue_seq)
    assert stored is not None
    message, body = queued_calls.unpack(stored.payload, stored.seq)
    assert await call_records.end(bus, msgspec.structs.replace(record, state=InvocationState.FAILED, ended_at=2.0))
    again = msgspec.structs.replace(message, attempt=2)
    next_seq = (await bus.publish_stored(QUEUE, pack(again, body))).seq
    await call_records.retry(bus, again, body, next_seq)
    letter = await dead_letters.read(bus, FUNCTION, record.id)
    assert letter is not None
    assert (letter[0].state, letter[1]) == (InvocationState.FAILED, b"{}")
    assert await streams.next_message(bus, subjects.ASYNC, QUEUE, next_seq) is None


async def forget(bus: Bus, record: CallRecord) -> None:
    """Like a call that has ended and whose retention is over."""
    await streams.delete_message(bus, subjects.ASYNC, record.queue_seq)
    await streams.purge(bus, subjects.RESULTS, subjects.result(FUNCTION, record.id))


async def test_an_id_is_a_new_call_each_time_that_the_one_before_is_forgotten(
    connect: Any, nats: EmbeddedServer
) -> None:
    """The queue remembers an id for minutes, but a record may be kept for a second."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    invocation = new_invocation_id()
    places = []
    for _ in range(4):
        record = await submit(bus, invocation, b"{}")
        again = await submit(bus, invocation, b"{}")
        assert again.queue_seq == record.queue_seq
        stored = await streams.message_at(bus, subjects.ASYNC, record.queue_seq)
        assert stored is not None
        places.append(record.queue_seq)
        await forget(bus, record)
    assert len(set(places)) == 4


async def test_the_dead_letter_of_an_id_that_was_used_again_is_that_of_the_call_that_failed_last(
    connect: Any, nats: EmbeddedServer
) -> None:
    """A dead letter is kept for two weeks, a record for a day."""
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    invocation = new_invocation_id()
    for body, at in ((b"first", 2.0), (b"second", 3.0)):
        record = await submit(bus, invocation, body)
        failed = msgspec.structs.replace(record, state=InvocationState.FAILED, ended_at=at)
        assert await call_records.end(bus, failed)
        stored = await streams.message_at(bus, subjects.ASYNC, record.queue_seq)
        assert stored is not None
        for payload in (body, b"not stored again"):
            await dead_letters.store(bus, failed, queued_calls.unpack(stored.payload, stored.seq)[0], payload)
        await forget(bus, record)
        letter = await dead_letters.read(bus, FUNCTION, invocation)
        assert letter is not None
        assert (letter[0].died_at, letter[1]) == (at, body)
