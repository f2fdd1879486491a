"""What the calls of this node took: added up in memory, and every few seconds to the records of this node.

A record is changed by compare-and-set, so that a runner which still ends its last calls and its successor both count.
What a runner that was killed had not stored yet, ten seconds' worth, is not counted.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import msgspec

from gpufn_core.domain.metering import STORED_EACH_S, Usage, UsageKey, day_of
from gpufn_core.errors import Conflict, GpufnError
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

_usage = msgspec.msgpack.Decoder(Usage)


class _Put(NamedTuple):
    """What was sent to be stored, and is not known to be."""

    usage: Usage
    value: bytes


class Meter:
    def __init__(self, records: KeyValue, node: str, clock: Clock) -> None:
        self._records = records
        self._node = node
        self._clock = clock
        self._counted: dict[UsageKey, Usage] = {}
        self._sent: dict[UsageKey, _Put] = {}

    def count(self, message: InvocationMessage, *, is_failed: bool, run_s: float, gpu_s: float) -> None:
        """An attempt has ended."""
        key = UsageKey(day_of(self._clock.time()), message.function, message.owner)
        self._add(key, Usage(1, int(is_failed), run_s, gpu_s))

    async def run(self) -> None:
        """Store what was counted until cancelled, and then once more."""
        try:
            while True:
                await asyncio.sleep(STORED_EACH_S)
                await self.store()
        finally:
            await self.store()

    async def store(self) -> None:
        """What cannot be stored now is kept for the next time."""
        for key in {**self._sent, **self._counted}:
            try:
                await self._store(key)
            except Conflict:
                log.info("the usage of %s was changed by another runner of this node: it is added later", key.function)
            except GpufnError as error:
                log.info("usage is not stored yet: %s", error)
                return

    async def _store(self, key: UsageKey) -> None:
        name = key.record(self._node)
        entry = await self._records.get(name)
        sent = self._sent.pop(key, None)
        if sent is not None and (entry is None or entry.value != sent.value):
            self._add(key, sent.usage)
        usage = self._counted.pop(key, None)
        if usage is None:
            return
        known = Usage() if entry is None else _usage.decode(entry.value)
        value = encode(known + usage)
        self._sent[key] = _Put(usage, value)
        if entry is None:
            await self._records.create(name, value)
        else:
            await self._records.update(name, value, entry.revision)
        del self._sent[key]

    def _add(self, key: UsageKey, usage: Usage) -> None:
        self._counted[key] = self._counted.get(key, Usage()) + usage
