"""Rate-limited wakeups: no call stays unannounced, and there are no more wakeups than needed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpufn_core.domain.revision import Revision
from gpufn_core.errors import BusUnavailable
from gpufn_core.ids import digest_of, new_map_id
from gpufn_core.protocol import subjects
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.priority import Priority, QueueKind
from gpufn_platform.bus.storage import streams
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.queue import map_log, wakeups
from gpufn_platform.queue.call_request import CallRequest
from gpufn_platform.queue.caller import Caller
from gpufn_platform.queue.records import call_records

NORMAL = QueueKind(Priority.NORMAL, is_sync=False)
LOW = QueueKind(Priority.LOW, is_sync=False)


def test_a_wakeup_names_its_queue_and_revision() -> None:
    payloads = wakeups.payload(3, LOW), wakeups.payload(12), b"", b"garbage", b"9" * 30
    assert [wakeups.queue_of(each) for each in payloads] == [LOW, None, None, None, None]
    assert [wakeups.revision_of(each) for each in payloads] == [3, 12, None, None, None]


async def test_simultaneous_arrivals_cause_a_wakeup_at_once_and_at_the_end(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    heard: asyncio.Queue[tuple[str, QueueKind | None]] = asyncio.Queue()
    bus.subscribe(
        subjects.WAKEUPS, lambda message: heard.put_nowait((message.subject, wakeups.queue_of(message.payload)))
    )
    sender = wakeups.WakeupSender(bus)
    for _ in range(100):
        sender.send_wakeup("f", NORMAL, 1)
    sender.send_wakeup("f", LOW, 1)
    sender.send_wakeup("g", NORMAL, 1)
    f, g = subjects.wakeup("f"), subjects.wakeup("g")
    assert [await heard.get() for _ in range(4)] == [(f, NORMAL), (f, LOW), (g, NORMAL), (f, NORMAL)]
    wakeups.send_wakeup(bus, "end", NORMAL, 1)
    assert await heard.get() == (subjects.wakeup("end"), NORMAL)


async def test_a_stored_call_is_accepted_although_its_wakeup_cannot_be_sent(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    publish = bus.publish

    def deaf(subject: str, payload: bytes, **fields: Any) -> None:
        if subject == subjects.wakeup("deaf"):
            raise BusUnavailable("The message bus has stopped reading what is sent to it.")
        publish(subject, payload, **fields)

    monkeypatch.setattr(bus, "publish", deaf)
    spec = FunctionSpec(name="deaf", entry=EntryPoint("m", "f"), methods=(MethodSpec(),), priority=Priority.LOW)
    revision = Revision(function="deaf", number=1, spec=spec, bundle=digest_of(b""), created_at=0.0)
    record = await call_records.submit(bus, CallRequest(revision, "", "", b"{}", accept="", deadline=0.0), now=1.0)
    assert await call_records.read(bus, record.id) == (record, b"")
    items = map_log.Items((b"1", b"2"), "", "")
    logged = await map_log.append(bus, None, new_map_id(), map_log.Target(revision, ""), items, now=1.0, closes=True)
    assert logged.entry.accepted == 2
    caller = Caller(bus, name="deaf", clock=SystemClock())
    caller.start()
    call = caller.invoke(CallRequest(revision, "", "", b"{}", "", 1e10))
    assert caller.pending == 1
    call.cancel()
