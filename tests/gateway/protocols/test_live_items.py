"""Items of a followed call: kept for readers while it runs, and shortly after its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import pack
from gpufn_core.protocol.messages import ItemReply
from gpufn_core.protocol.records import CallRecord
from gpufn_gateway.protocols.live_items import LiveItems
from tests.waiting import until_async

ITEMS, RECORD = subjects.live_items("x"), subjects.any_result("x")


class StubBus:
    """Subscriptions, by their subject."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[[Any], None]] = {}

    def subscribe(self, subject: str, handler: Callable[[Any], None]) -> Any:
        self.handlers[subject] = handler
        return SimpleNamespace(unsubscribe=lambda: self.handlers.pop(subject))

    def send_item(self, number: int) -> None:
        self.handlers[ITEMS](SimpleNamespace(payload=pack(ItemReply("x", number, "application/json", ""), b"1")))

    def send_record(self, state: InvocationState) -> None:
        record = CallRecord(id="x", function="f", revision=1, state=state, submitted_at=0.0)
        self.handlers[RECORD](SimpleNamespace(payload=pack(record, b"")))


@pytest.mark.parametrize("state", [InvocationState.SUCCEEDED, InvocationState.FAILED, InvocationState.CANCELLED])
async def test_items_are_forgotten_after_the_end_of_their_call(state: InvocationState) -> None:
    bus: Any = StubBus()
    live = LiveItems(bus, kept_s=0.0)
    live.follow("x")
    bus.send_item(0)
    bus.send_record(InvocationState.QUEUED)  # a retry
    await asyncio.sleep(0)
    assert len(live.after("x", 0)) == 1
    bus.send_record(state)
    assert len(live.after("x", 0)) == 1
    await until_async(lambda: not live.after("x", 0))
    assert bus.handlers == {}


async def test_a_call_whose_reader_has_all_items_leaves_nothing() -> None:
    bus: Any = StubBus()
    live = LiveItems(bus)
    live.follow("x")
    bus.send_item(0)
    bus.send_record(InvocationState.SUCCEEDED)
    live.forget("x")
    assert (live.after("x", 0), bus.handlers) == ([], {})
