"""Operations on queues and dicts, which functions request over the bus and clients over HTTP."""

from __future__ import annotations

from typing import NamedTuple

from gpufn_core.protocol import codec
from gpufn_core.protocol.data import (
    WAIT_S,
    CountItems,
    DictOperation,
    GetEntry,
    GetItem,
    ItemReply,
    ListKeys,
    PutItem,
    QueueOperation,
    RemoveEntry,
    SetEntry,
    SettleItem,
)
from gpufn_gateway.data.dicts import Dicts
from gpufn_gateway.data.queues import Queues
from gpufn_gateway.teams.storage import TeamStorage


class Outcome(NamedTuple):
    """The reply to an operation. `is_change`: it changed stored data."""

    content_type: str
    body: bytes
    is_change: bool


class Operations:
    def __init__(self, queues: Queues, dicts: Dicts, storage: TeamStorage) -> None:
        self.queues = queues
        self.storage = storage
        self.dicts = dicts

    async def execute(self, name: str, operation: QueueOperation | DictOperation, value: bytes) -> Outcome:
        """Execute an operation on the queue or dict with this full name. Raises GpufnError."""
        if isinstance(operation, (GetEntry, SetEntry, RemoveEntry, ListKeys)):
            return await self._on_dict(name, operation, value)
        return await self._on_queue(name, operation, value)

    async def _on_queue(self, name: str, operation: QueueOperation, value: bytes) -> Outcome:
        match operation:
            case PutItem(_, content_type, id_, ttl_s, max_items):
                await self.storage.admit_item(name, len(value))
                await self.queues.put(name, content_type, value, ttl_s=ttl_s, max_items=max_items, id_=id_)
                return Outcome("", b"", True)
            case GetItem(_, wait_s, lease_s, max_deliveries):
                wait_s = max(0.0, min(wait_s, WAIT_S))
                item = await self.queues.get(name, wait_s=wait_s, lease_s=lease_s, max_deliveries=max_deliveries)
                if item is None:
                    return Outcome("", b"", False)
                header = ItemReply(item.lease, item.content_type, item.deliveries)
                return Outcome("", codec.pack(header, item.value), False)
            case SettleItem(_, lease, is_done):
                await self.queues.settle(name, lease, is_done=is_done)
                return Outcome("", b"", False)
            case CountItems():
                return Outcome("", codec.encode(await self.queues.size(name)), False)

    async def _on_dict(self, name: str, operation: DictOperation, value: bytes) -> Outcome:
        match operation:
            case GetEntry(_, key):
                found = await self.dicts.get(name, key)
                return Outcome("", b"", False) if found is None else Outcome(*found, False)
            case SetEntry(_, key, content_type, ttl_s, only_new):
                await self.storage.admit(name, len(value))
                is_set = await self.dicts.set(name, key, content_type, value, ttl_s=ttl_s, only_new=only_new)
                return Outcome("", codec.encode(is_set), True)
            case RemoveEntry(_, key):
                return Outcome("", codec.encode(await self.dicts.remove(name, key)), True)
            case ListKeys():
                return Outcome("", codec.encode(await self.dicts.keys(name)), False)
