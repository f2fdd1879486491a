"""Items of submitted generator calls as they come, for calls that this gateway has submitted.

They are previews, kept in memory for readers that come later, until shortly after the end of the call: the result has
all items. A reader that finds none waits for the result.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, NamedTuple

from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import Unpacker
from gpufn_core.protocol.messages import ItemReply
from gpufn_core.protocol.records import unpack_record
from gpufn_platform.bus.connection import Bus, Message, Subscription

_MAX_CALLS: Final = 64  # calls whose items are kept; a worker sends at most 4 MiB of each
_KEPT_S: Final = 30.0  # after the end; a call that failed has no result with its items

_unpack: Unpacker[ItemReply] = Unpacker(ItemReply)


class LiveItem(NamedTuple):
    content_type: str
    body: bytes


class _Call:
    def __init__(self) -> None:
        self.items: list[LiveItem] = []
        self.changed = asyncio.Event()
        self.subscriptions: list[Subscription] = []
        self.timer: asyncio.TimerHandle | None = None

    def on_message(self, message: Message) -> None:
        item, body = _unpack(message.payload)
        if item.number == len(self.items):  # a retry begins again, and a lost item ends the previews
            self.items.append(LiveItem(item.content_type, bytes(body)))
            self.changed.set()


class LiveItems:
    def __init__(self, bus: Bus, kept_s: float = _KEPT_S) -> None:
        self._bus = bus
        self._kept_s = kept_s
        self._calls: OrderedDict[str, _Call] = OrderedDict()

    def follow(self, invocation: str) -> None:
        """Keep the items of a call. Call before it is submitted."""
        if invocation in self._calls:
            return
        call = self._calls[invocation] = _Call()

        def on_record(message: Message) -> None:
            if call.timer is None and message.payload and unpack_record(message.payload)[0].state.ended:
                call.timer = asyncio.get_running_loop().call_later(self._kept_s, self.forget, invocation)

        call.subscriptions = [
            self._bus.subscribe(subjects.live_items(invocation), call.on_message),
            self._bus.subscribe(subjects.any_result(invocation), on_record),
        ]
        while len(self._calls) > _MAX_CALLS:
            self.forget(next(iter(self._calls)))

    def forget(self, invocation: str) -> None:
        call = self._calls.pop(invocation, None)
        if call is None:
            return
        if call.timer is not None:
            call.timer.cancel()
        for subscription in call.subscriptions:
            subscription.unsubscribe()

    def after(self, invocation: str, count: int) -> list[LiveItem]:
        """Return the items after the first `count`."""
        call = self._calls.get(invocation)
        return [] if call is None else call.items[count:]

    async def wait(self, invocation: str, count: int) -> None:
        """Wait until there are more than `count` items. Never returns for a call that is not followed here."""
        call = self._calls.get(invocation)
        while call is None or len(call.items) <= count:
            if call is None:
                await asyncio.Event().wait()
            else:
                call.changed.clear()
                await call.changed.wait()
