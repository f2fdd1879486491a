"""Queues, dicts and stored values in this process, for `gpufn.testing.run_locally`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpufn_core.errors import Conflict, DataNotFound, InvalidInput, QueueFull
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import codec
from gpufn_core.protocol.data import (
    CountItems,
    DictOperation,
    GetEntry,
    GetItem,
    GetValue,
    ItemReply,
    ListKeys,
    Operation,
    PutItem,
    PutValue,
    QueueOperation,
    RemoveEntry,
    SetEntry,
    SettleItem,
    StoredValue,
    dead_letters_of,
)

_NEVER: Final = float("inf")


@dataclass
class _Stored:
    """An item of a queue, an entry of a dict, or a stored value. The times are times of the channel's clock."""

    content_type: str
    value: bytes
    expires_at: float
    lease: str = ""
    lease_ends_at: float = 0.0
    deliveries: int = 0


class LocalChannel:
    """A `gpufn.data.channel.Channel` that stores everything in memory. Threads may share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._queues: dict[str, dict[str, _Stored]] = {}
        self._dicts: dict[str, dict[str, _Stored]] = {}
        self._values: dict[str, _Stored] = {}

    def execute(self, operation: Operation, value: bytes = b"") -> tuple[str, bytes]:
        with self._changed:
            match operation:
                case PutItem() | GetItem() | SettleItem() | CountItems():
                    return "", self._on_queue(operation, value)
                case PutValue() | GetValue():
                    return "", self._on_value(operation, value)
                case GetEntry() | SetEntry() | RemoveEntry() | ListKeys():
                    return self._on_dict(operation, value)
        raise InvalidInput("run_locally has no volumes: test the code around them with a folder of your own")

    def _on_queue(self, operation: QueueOperation, value: bytes) -> bytes:
        match operation:
            case PutItem(name, content_type, id_, ttl_s, max_items):
                self._put(name, id_, self._stored(content_type, value, ttl_s), max_items)
                return b""
            case GetItem():
                return self._get(operation)
            case SettleItem(name, lease, is_done):
                self._settle(name, lease, is_done)
                return b""
            case CountItems(name):
                return codec.encode(len(self._live(self._queues, name)))

    def _on_value(self, operation: PutValue | GetValue, value: bytes) -> bytes:
        if isinstance(operation, GetValue):
            return self._value(operation.name)
        id_ = new_ulid()
        self._values[id_] = self._stored("", value, operation.ttl_s)
        return codec.encode(StoredValue(id_, len(value)))

    def _on_dict(self, operation: DictOperation, value: bytes) -> tuple[str, bytes]:
        entries = self._live(self._dicts, operation.name)
        match operation:
            case GetEntry(_, key):
                entry = entries.get(key)
                return (entry.content_type, entry.value) if entry is not None else ("", b"")
            case SetEntry(_, key, content_type, ttl_s, only_new):
                is_set = not (only_new and key in entries)
                if is_set:
                    entries.pop(key, None)  # keys are listed by their last change
                    entries[key] = self._stored(content_type, value, ttl_s)
                return "", codec.encode(is_set)
            case RemoveEntry(_, key):
                return "", codec.encode(entries.pop(key, None) is not None)
            case ListKeys():
                return "", codec.encode(list(entries))

    def _put(self, name: str, id_: str, item: _Stored, max_items: int | None) -> None:
        items = self._live(self._queues, name)
        if max_items is not None and len(items) >= max_items:
            raise QueueFull(f"{name} has {max_items:,} items, as many as it may have.", retry_after_s=1.0)
        items.setdefault(id_, item)
        self._changed.notify()

    def _get(self, get: GetItem) -> bytes:
        ends_at = self._clock() + get.wait_s
        while True:
            items = self._live(self._queues, get.name)
            for id_, item in list(items.items()):
                if item.lease and item.lease_ends_at > self._clock():
                    continue
                if get.max_deliveries is not None and item.deliveries >= get.max_deliveries:
                    dead = self._stored(item.content_type, item.value, None)
                    self._put(dead_letters_of(get.name), id_, dead, None)
                    del items[id_]
                    continue
                item.lease, item.lease_ends_at = f"{id_}.{new_ulid()}", self._clock() + get.lease_s
                item.deliveries += 1
                return codec.pack(ItemReply(item.lease, item.content_type, item.deliveries), item.value)
            next_s = min((item.lease_ends_at for item in items.values()), default=_NEVER)
            remaining_s = min(ends_at, next_s) - self._clock()
            if ends_at <= self._clock():
                return b""
            self._changed.wait(max(0.0, remaining_s))

    def _settle(self, name: str, lease: str, is_done: bool) -> None:
        items = self._live(self._queues, name)
        id_ = lease.partition(".")[0]
        item = items.get(id_)
        if item is None or item.lease != lease:
            raise Conflict(f"The lease of this item of {name} has ended: the item may be delivered again.")
        if is_done:
            del items[id_]
        else:
            item.lease = ""
            self._changed.notify()

    def _value(self, id_: str) -> bytes:
        found = self._values.get(id_)
        if found is None or found.expires_at <= self._clock():
            raise DataNotFound(f"There is no value {id_[:100]!r}: it may have expired.")
        return found.value

    def _stored(self, content_type: str, value: bytes, ttl_s: float | None) -> _Stored:
        return _Stored(content_type, bytes(value), _NEVER if ttl_s is None else self._clock() + ttl_s)

    def _live(self, stored: dict[str, dict[str, _Stored]], name: str) -> dict[str, _Stored]:
        """Return the items or entries that have not expired."""
        found = stored.setdefault(name, {})
        for key in [key for key, each in found.items() if each.expires_at <= self._clock()]:
            del found[key]
        return found
