"""Records with compare-and-set, and watches. Other NATS clients can read them as ordinary key-value buckets.

A bucket is a stream `KV_<bucket>` with a subject `$KV.<bucket>.<key>` per key; a record's revision is its sequence in
that stream, so it grows over the whole bucket. Every read is answered by the stream's leader.

What is written or read through a KeyValue is told to its own watches at once, and only once: who keeps records in
memory by a watch finds there what it wrote, and nothing older comes after something newer, however late an answer is.

A record is replaced by messages with `Nats-Rollup` only. The server sends answers to any reply subject that a client
names, without a look at the client's permissions: an answer to `$KV.<bucket>.<key>` does not replace the record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Container
from typing import Any, Self

import msgspec

from gpufn_core.errors import BusUnavailable, Conflict, PlatformError
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import ordered_reader as feed
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.ordered_reader import Feed, StoredMessage

log = logging.getLogger(__name__)

_KEY = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9_=.-]*")
_REPLACE = {"Nats-Rollup": "sub"}
_DELETE = {"KV-Operation": "DEL", **_REPLACE}
_SENT_AGAIN = "Nats-Stream"  # of a message that the server has read from a stream for somebody
_NO_RECORD = ("KV-Operation", "Nats-Marker-Reason", _SENT_AGAIN)  # headers
_MARKED_S = 3600.0  # a deletion tells who watches; who was cut off finds by himself what has vanished
_NANO = 1_000_000_000
_TRIES = 50  # each lost race means that somebody else's change went through


class Entry(msgspec.Struct, frozen=True):
    key: str
    value: bytes
    revision: int


def stream_of(bucket: str) -> str:
    return f"KV_{bucket}"


class KeyValue:
    """A bucket that exists, or one that `ensure` creates: where `config` is given, which only gateways may do."""

    def __init__(self, bus: Bus, bucket: str, config: dict[str, Any] | None = None) -> None:
        self.bus = bus
        self.bucket = bucket
        self.stream = stream_of(bucket)
        self._prefix = f"$KV.{bucket}."
        self._config = config
        self._watches: set[Watch] = set()

    @classmethod
    async def open(
        cls, bus: Bus, bucket: str, *, ttl_s: float | None = None, history: int = 1, memory: bool = False
    ) -> Self:
        """The bucket, created if it is absent. `ttl_s`: records vanish after so long, and watches are not told."""
        ttl = int((ttl_s or 0) * _NANO)
        window = 120 * _NANO
        kv = cls(
            bus,
            bucket,
            {
                "subjects": [f"$KV.{bucket}.>"],
                "storage": "memory" if memory else "file",
                "max_msgs_per_subject": history,
                "max_age": ttl,
                "duplicate_window": min(ttl, window) if ttl else window,
                "discard": "new",
                "discard_new_per_subject": True,
                "deny_delete": True,
                "allow_rollup_hdrs": True,
                "allow_direct": True,
                "allow_msg_ttl": True,
            },
        )
        await kv.ensure()
        return kv

    async def ensure(self) -> None:
        """Create the bucket if the server does not have it; one in memory goes with its server."""
        if self._config is not None:
            await streams.ensure_stream(self.bus, self.stream, self._config)

    def subject(self, key: str) -> str:
        if not _KEY.fullmatch(key) or key.endswith(".") or ".." in key:
            raise ValueError(f"not a key: {key!r}")
        return self._prefix + key

    async def get(self, key: str) -> Entry | None:
        message = await streams.last_message(self.bus, self.stream, self.subject(key))
        entry = self.entry_of(message)
        if message is not None:
            self._learn(key, entry, message.seq)
        return entry

    async def put(self, key: str, value: bytes) -> int:
        """Returns the new revision."""
        stored = await self.bus.publish_stored(self.subject(key), value, headers=_REPLACE)
        self._learn(key, Entry(key, value, stored.seq), stored.seq)
        return stored.seq

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None, timeout_s: float = 5.0) -> int:
        """Raises Conflict if the key is there. One that was deleted can be created again."""
        try:
            return await self.update(key, value, 0, ttl_s=ttl_s, timeout_s=timeout_s)
        except Conflict:
            last = await streams.last_message(self.bus, self.stream, self.subject(key))
            if last is not None and self.entry_of(last) is not None:
                raise Conflict(f"{self.bucket}/{key} exists already, at revision {last.seq}.") from None
        # A marker of a deletion, or it has just expired.
        return await self.update(key, value, last.seq if last else 0, ttl_s=ttl_s, timeout_s=timeout_s)

    async def deleted_at(self, key: str) -> int:
        """The revision of the marker that a deletion has left; 0 when there is nothing. Raises Conflict of a record."""
        last = await streams.last_message(self.bus, self.stream, self.subject(key))
        if self.entry_of(last) is not None:
            raise Conflict(f"{self.bucket}/{key} exists.")
        return 0 if last is None else last.seq

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl_s: float | None = None, timeout_s: float = 5.0
    ) -> int:
        """Raises Conflict unless the key is at `revision` now."""
        stored = await self.bus.publish_stored(
            self.subject(key), value, expected_last=revision, ttl_s=ttl_s, timeout_s=timeout_s, headers=_REPLACE
        )
        self._learn(key, Entry(key, value, stored.seq), stored.seq)
        return stored.seq

    async def change(self, key: str, change: Callable[[Entry | None], bytes]) -> Entry:
        """The record as it is then. `change` gets what is stored, and gives what shall be; it is asked again when
        somebody else was quicker. Raises Conflict when that never ends."""
        for _ in range(_TRIES):
            entry = await self.get(key)
            value = change(entry)
            if entry is not None and value == entry.value:
                return entry
            try:
                if entry is None:
                    return Entry(key, value, await self.create(key, value))
                return Entry(key, value, await self.update(key, value, entry.revision))
            except Conflict:
                continue
        raise Conflict(f"{self.bucket}/{key} is being changed by too many at once; try again.")

    async def delete(self, key: str, revision: int | None = None, *, marked_s: float | None = None) -> None:
        """With `revision`: raises Conflict unless the key is at it now. The deletion's marker stays for `marked_s`."""
        ttl_s = _MARKED_S if marked_s is None else marked_s
        stored = await self.bus.publish_stored(
            self.subject(key), b"", expected_last=revision, ttl_s=ttl_s, headers=_DELETE
        )
        self._learn(key, None, stored.seq)

    async def entries(self, prefix: str = "") -> list[Entry]:
        """Every present record whose key starts with `prefix`, oldest change first."""
        found = await feed.collect(self.bus, self.stream, self.subjects(prefix))
        entries = [self.entry_of(message) for message in found]
        return [entry for entry in entries if entry is not None and entry.key.startswith(prefix)]

    async def damaged(self, prefix: str, known: Container[str]) -> list[str]:
        """Keys that the server counts, and cannot read from its disk; `known` can be read."""
        counted = await streams.messages_per_subject(self.bus, self.stream, self.subjects(prefix))
        keys = [key for subject in counted if (key := subject.removeprefix(self._prefix)).startswith(prefix)]
        return [
            key
            for key in keys
            if key not in known and await streams.last_message(self.bus, self.stream, self._prefix + key) is None
        ]

    async def keys(self, prefix: str = "") -> list[str]:
        return [entry.key for entry in await self.entries(prefix)]

    async def watch(self, on_change: Callable[[str, Entry | None], None], *, prefix: str = "") -> Watch:
        """Call `on_change(key, entry)` for every record there is, then, after this returns, for each change.

        None means deleted. After a reconnect everything is told again, and the deletion of what has vanished.
        """
        watch = Watch(self, prefix, on_change)
        await watch.start()
        return watch

    def tell(self, watch: Watch) -> None:
        """What is read or written here is told to it at once, as well as when it comes to its Feed."""
        self._watches.add(watch)

    def tell_no_more(self, watch: Watch) -> None:
        self._watches.discard(watch)

    def _learn(self, key: str, entry: Entry | None, revision: int) -> None:
        for watch in list(self._watches):
            watch.learn(key, entry, revision)

    def subjects(self, prefix: str) -> str:
        """Those of the keys that begin so, and of few others."""
        whole_tokens, dot, _ = prefix.rpartition(".")
        return f"{self._prefix}{whole_tokens}{dot}>"

    def key_of(self, message: StoredMessage) -> str:
        return message.subject.removeprefix(self._prefix)

    def entry_of(self, message: StoredMessage | None) -> Entry | None:
        """None for the marker that a deletion or an expiry leaves, and for what is no record: somebody had the server
        send a message of another stream here, as the answer to a request."""
        if message is None or not message.headers.keys().isdisjoint(_NO_RECORD):
            return None
        return Entry(self.key_of(message), message.payload, message.seq)


class Watch:
    """Made by `KeyValue.watch`. Each round opens a Feed: the snapshot, then the changes, until the Feed is lost."""

    def __init__(self, kv: KeyValue, prefix: str, on_change: Callable[[str, Entry | None], None]) -> None:
        self._kv = kv
        self._prefix = prefix
        self._on_change = on_change
        self._known: set[str] = set()
        self._fresh: set[str] | None = None  # the keys of a snapshot that is not complete yet
        self._missing: set[str] = set()  # known, and not in the last one
        self._seq = 0  # what is older has been told, or something newer
        self._ahead: dict[str, int] = {}  # key → the revision that was learnt of it before it came
        self._checking: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._feed: Feed | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._complete = asyncio.Event()

    def stop(self) -> None:
        self._kv.tell_no_more(self)
        if self._task is not None:
            self._task.cancel()
        for task in (self._checking, self._telling):
            if task is not None:
                task.cancel()
        if self._feed is not None:
            self._feed.close()

    def learn(self, key: str, entry: Entry | None, revision: int) -> None:
        """`key` was stored at `revision`: tell it, unless that or something newer has been told. None: deleted."""
        if not key.startswith(self._prefix) or revision <= max(self._seq, self._ahead.get(key, 0)):
            return
        self._ahead[key] = revision
        if self._fresh is not None and entry is not None:
            self._fresh.add(key)
        if entry is not None or key in self._known:
            self._tell(key, entry)

    async def start(self) -> None:
        """Once. Raises PlatformError."""
        await self._open()
        self._kv.tell(self)
        self._task = asyncio.create_task(self._run(), name=f"watch-{self._kv.bucket}")
        try:
            await self._first_snapshot()
        except BaseException:
            self.stop()
            raise

    async def _first_snapshot(self) -> None:
        while True:
            await self._complete.wait()
            assert self._feed is not None
            feed = self._feed
            try:
                await feed.catch_up()
            except BusUnavailable:
                if feed.is_open:
                    raise
            else:
                return

    async def _run(self) -> None:
        while True:
            await self._lost.wait()
            await feed.reopen_pause()
            with contextlib.suppress(PlatformError):
                await self._kv.ensure()
                await self._open()

    async def _open(self) -> None:
        self._lost.clear()
        self._fresh = set()
        self._seq, self._ahead = 0, {}  # the bucket may have been made again, and count anew
        try:
            self._feed = await Feed.open(
                self._kv.bus, self._kv.stream, self._kv.subjects(self._prefix), self._on_message, self._on_lost,
                on_no_more=self._on_no_more,
            )  # fmt: skip
        except BaseException:
            self._lost.set()
            raise
        if not self._feed.pending:
            self._snapshot_done()

    def _on_lost(self, why: str) -> None:
        log.info("the watch of %s is opened again: %s", self._kv.bucket, why)
        self._complete.clear()
        self._lost.set()

    def _on_message(self, message: StoredMessage, pending: int) -> None:
        assert self._feed is not None
        self._feed.take()
        self._seq = message.seq
        key = self._kv.key_of(message)
        ahead = self._ahead.get(key, 0)
        if message.seq >= ahead:
            self._ahead.pop(key, None)
        if key.startswith(self._prefix) and message.seq > ahead:
            entry = self._kv.entry_of(message)
            if self._fresh is not None and entry is not None:
                self._fresh.add(key)
            if entry is not None or key in self._known:
                self._tell(key, entry)
        if not pending and self._fresh is not None and self._feed.is_open:
            self._snapshot_done()

    def _on_no_more(self) -> None:
        self._telling = asyncio.create_task(self._tell_damaged(), name=f"watch-{self._kv.bucket}-damaged")
        if self._fresh is not None:
            self._snapshot_done()

    async def _tell_damaged(self) -> None:
        """What is counted and cannot be read."""
        with contextlib.suppress(PlatformError):
            for key in await self._kv.damaged(self._prefix, self._known):
                log.error("%s/%s is damaged on the disk of the message bus, and missing here", self._kv.bucket, key)

    def _snapshot_done(self) -> None:
        fresh, self._fresh = self._fresh or set(), None
        self._missing = self._known - fresh
        if self._missing and (self._checking is None or self._checking.done()):
            self._checking = asyncio.create_task(self._check_missing(), name=f"watch-{self._kv.bucket}-missing")
        self._complete.set()

    async def _check_missing(self) -> None:
        """What was changed while the snapshot was on its way is not in it and comes behind it: only the leader knows
        what has vanished."""
        while self._missing:
            key = next(iter(self._missing))
            try:
                entry = await self._kv.get(key)
            except PlatformError:
                await feed.reopen_pause()
                continue
            if key in self._missing:
                self._missing.discard(key)
                if entry is None:
                    self._tell(key, None)

    def _tell(self, key: str, entry: Entry | None) -> None:
        self._missing.discard(key)
        if entry is None:
            self._known.discard(key)
        else:
            self._known.add(key)
        try:
            self._on_change(key, entry)
        except Exception:
            log.exception("a watcher of %s failed on %s", self._kv.bucket, key)
