"""`Queue`: a queue by name, for functions and clients."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

import msgspec

from gpufn.data import channel
from gpufn_core.encoding import media, values
from gpufn_core.errors import GpufnError, InvalidInput, ResultNotEncodable
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import codec
from gpufn_core.protocol.data import (
    ITEM_BYTES,
    WAIT_S,
    CountItems,
    GetItem,
    ItemReply,
    PutItem,
    SettleItem,
    check_max_deliveries,
    check_seconds,
)
from gpufn_core.spec.volume_spec import check_name

T = TypeVar("T")

_LEASE_S: Final = 60.0
_unpack: codec.Unpacker[ItemReply] = codec.Unpacker(ItemReply)


class Queue:
    """A queue by name. Items are delivered in order, and each at least once.

    `lease`: seconds for which a taken item belongs to its taker; then it is delivered again, unless acknowledged.
    `ttl`: seconds after which an item disappears, at most 7 days, which is also the default. `max_items` limits the
    queue. `max_deliveries`: an item that was delivered so often, and never acknowledged, is moved to the queue
    `NAME-dead`. Default: it is delivered again until its `ttl` ends.

    >>> from gpufn import Queue
    >>> jobs = Queue("jobs", lease=300)
    >>> def work() -> None:
    ...     with jobs.get(timeout=20) as job:  # acknowledged at the end; after an exception, delivered again
    ...         print(job)
    """

    def __init__(
        self,
        name: str,
        *,
        lease: float = _LEASE_S,
        ttl: float | None = None,
        max_items: int | None = None,
        max_deliveries: int | None = None,
    ) -> None:
        check_name(name)
        if max_deliveries is not None:
            check_max_deliveries(name, max_deliveries)
        check_seconds("lease", lease)
        check_seconds("ttl", ttl)
        self.name = name
        self._lease_s = lease
        self._ttl_s = ttl
        self._max_items = max_items
        self._max_deliveries = max_deliveries

    def put(self, value: Any) -> None:
        """Append an item. Raises InvalidInput for a value that cannot be sent, QueueFull."""
        operation = PutItem(self.name, media.NATIVE, new_ulid(), self._ttl_s, self._max_items)
        channel.current().execute(operation, encode(value))

    def get(self, timeout: float | None = None) -> Leased[Any]:
        """Take the first item, after waiting for one. Raises TimeoutError."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while True:
            wait_s = WAIT_S if give_up is None else max(0.0, min(WAIT_S, give_up - time.monotonic()))
            _, body = channel.current().execute(GetItem(self.name, wait_s, self._lease_s, self._max_deliveries))
            if body:
                header, value = _unpack(body)
                return Leased(self.name, header, value)
            if give_up is not None and time.monotonic() >= give_up:
                raise TimeoutError(f"no item came into the queue {self.name} within {timeout:g} s")

    def __len__(self) -> int:
        """The number of items, with the taken ones."""
        _, body = channel.current().execute(CountItems(self.name))
        return msgspec.msgpack.decode(body, type=int)


class Leased(Generic[T]):
    """A taken item. As a context manager it returns the value, and acknowledges the item at the end. After an exception
    it releases the item instead."""

    def __init__(self, queue: str, header: ItemReply, value: bytes) -> None:
        self._queue = queue
        self._lease = header.lease
        self.deliveries = header.deliveries
        self.value: Any = values.decode_value(header.content_type or media.BYTES, value)

    def ack(self) -> None:
        """Remove the item from the queue."""
        channel.current().execute(SettleItem(self._queue, self._lease, is_done=True))

    def release(self) -> None:
        """Let the item be delivered again, now."""
        channel.current().execute(SettleItem(self._queue, self._lease, is_done=False))

    def __enter__(self) -> Any:
        return self.value

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.ack()
            return
        try:
            self.release()
        except GpufnError:  # the lease ends by itself
            return


def encode(value: Any) -> bytes:
    """Encode a value for a queue or a dict. Raises InvalidInput."""
    try:
        body = values.encode_result(value, media.NATIVE, limit_bytes=sys.maxsize, what="value")[1]
    except ResultNotEncodable as error:
        raise InvalidInput(error.message) from error
    if len(body) > ITEM_BYTES:
        raise InvalidInput(
            f"the value takes {len(body):,} bytes, more than the {ITEM_BYTES:,} of an item of a queue or an entry of a "
            "dict: store it with gpufn.put, or in a Volume"
        )
    return body
