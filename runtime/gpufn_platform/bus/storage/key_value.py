"""Key-value buckets with compare-and-set and watches. Other NATS clients can read them as ordinary buckets.

A bucket is a stream `KV_<bucket>` with a subject `$KV.<bucket>.<key>` per key. A record's revision is its sequence in
that stream, so revisions grow over the whole bucket. The stream's leader answers every read.

A KeyValue reports its own writes and reads to its own watches at once, and exactly once. So a process that mirrors
records in memory with a watch finds its own writes there. It never sees an older value after a newer one, however late
a response arrives.

Only messages with `Nats-Rollup` replace a record. The server publishes responses to any reply subject that a client
chooses, without checking the client's permissions: a response sent to `$KV.<bucket>.<key>` does not replace the record.
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

_KEY = re.compile(r"[A-Za-z0-9_=/-][A-Za-z0-9_=./-]*")
_REPLACE = {"Nats-Rollup": "sub"}
_DELETE = {"KV-Operation": "DEL", **_REPLACE}
_COPIED = "Nats-Stream"  # on a message that the server has read from a stream for a client
_NO_RECORD = ("KV-Operation", "Nats-Marker-Reason", _COPIED)  # headers
_MARKED_S = 3600.0  # the marker informs watches of the deletion; a watch that was cut off detects missing keys itself
_NANO = 1_000_000_000
_MAX_TRIES = 50  # each lost race means that another writer's change succeeded


class Entry(msgspec.Struct, frozen=True):
    key: str
    value: bytes
    revision: int


def stream_of(bucket: str) -> str:
    return f"KV_{bucket}"


class KeyValue:
    """A bucket. `ensure` creates it if `config` is given, which is only permitted to gateways."""

    def __init__(self, bus: Bus, bucket: str, config: dict[str, Any] | None = None) -> None:
        self.bus = bus
        self.bucket = bucket
        self.stream = stream_of(bucket)
        self._prefix = f"$KV.{bucket}."
        self._config = config
        self.watches: set[Watch] = set()  # local reads and writes are reported to them at once

    @classmethod
    async def open(
        cls,
        bus: Bus,
        bucket: str,
        *,
        ttl_s: float = 0,
        history: int = 1,
        memory: bool = False,
        max_bytes: int | None = None,
    ) -> Self:
        """Open the bucket, creating it if absent. `ttl_s`: record lifetime, 0 for none; watches do not see expiries.
        Once the bucket has `max_bytes`, writes and deletions raise QueueFull; `purge` still works."""
        ttl = int(ttl_s * _NANO)
        window = 120 * _NANO
        kv = cls(
            bus,
            bucket,
            {
                "subjects": [f"$KV.{bucket}.>"],
                "storage": "memory" if memory else "file",
                "max_msgs_per_subject": history,
                "max_bytes": -1 if max_bytes is None else max_bytes,
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
        """Create the bucket if the server does not have it: a bucket in memory is lost when its server stops."""
        if self._config is not None:
            await streams.ensure_stream(self.bus, self.stream, self._config)

    def subject(self, key: str) -> str:
        if not _KEY.fullmatch(key) or key.endswith(".") or ".." in key:
            raise ValueError(f"not a key: {key!r}")
        return self._prefix + key

    async def get(self, key: str) -> Entry | None:
        """Return the current record, or None if it does not exist."""
        message = await streams.last_message(self.bus, self.stream, self.subject(key))
        entry = self.entry_of(message)
        if message is not None:
            self._notify(key, entry, message.seq)
        return entry

    async def put(self, key: str, value: bytes) -> int:
        """Store the record unconditionally; returns the new revision."""
        return await self.update(key, value, None)

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None, timeout_s: float = 5.0) -> int:
        """Create the record; returns its revision. Raises Conflict if the key exists. A deleted key may be reused."""
        try:
            return await self.update(key, value, 0, ttl_s=ttl_s, timeout_s=timeout_s)
        except Conflict:  # the key may have a deletion marker, or has just expired
            return await self.update(key, value, await self.deleted_at(key), ttl_s=ttl_s, timeout_s=timeout_s)

    async def deleted_at(self, key: str) -> int:
        """Return the revision of a deletion marker, 0 if there is none. Raises Conflict if the key exists."""
        last = await streams.last_message(self.bus, self.stream, self.subject(key))
        if last is not None and self.entry_of(last) is not None:
            raise Conflict(f"{self.bucket}/{key} exists already, at revision {last.seq}.")
        return 0 if last is None else last.seq

    async def update(
        self, key: str, value: bytes, revision: int | None, *, ttl_s: float | None = None, timeout_s: float = 5.0
    ) -> int:
        """Replace the record; returns the new revision. Raises Conflict unless the key is at `revision`, if given."""
        stored = await self.bus.publish_stored(
            self.subject(key), value, expected_last=revision, ttl_s=ttl_s, timeout_s=timeout_s, headers=_REPLACE
        )
        self._notify(key, Entry(key, value, stored.seq), stored.seq)
        return stored.seq

    async def change(self, key: str, change: Callable[[Entry | None], bytes]) -> Entry:
        """Read, modify and write a record; returns the record as stored.

        `change` maps the current record to the new value. It is called again when another writer was faster. Raises
        Conflict after too many attempts."""
        for _ in range(_MAX_TRIES):
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
        raise Conflict(f"{self.bucket}/{key} is being changed by too many writers at once; try again.")

    async def delete(self, key: str, revision: int | None = None, *, marked_s: float = _MARKED_S) -> None:
        """Delete a record. Raises Conflict unless the key is at `revision`. `marked_s`: lifetime of the marker."""
        subject = self.subject(key)
        stored = await self.bus.publish_stored(subject, b"", expected_last=revision, ttl_s=marked_s, headers=_DELETE)
        self._notify(key, None, stored.seq)

    async def purge(self, keys: str) -> int:
        """Delete the records that match `keys`, which may end with a wildcard. Return their number. Watches do not see
        it."""
        return await streams.purge(self.bus, self.stream, f"{self._prefix}{keys}")

    async def entries(self, prefix: str = "") -> list[Entry]:
        """Return every record whose key starts with `prefix`, oldest change first."""
        messages = await feed.collect(self.bus, self.stream, self.subjects(prefix))
        entries = [self.entry_of(message) for message in messages]
        return [entry for entry in entries if entry is not None and entry.key.startswith(prefix)]

    async def damaged(self, prefix: str, known: Container[str]) -> list[str]:
        """Return keys that the server counts but cannot read from its disk. `known`: keys that are readable."""
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
        """Call `on_change(key, entry)` for every existing record, then, after this returns, for each change.

        An entry of None means deleted. After a reconnect every record is reported again, and records that vanished
        are reported as deleted.
        """
        watch = Watch(self, prefix, on_change)
        await watch.start()
        return watch

    def _notify(self, key: str, entry: Entry | None, revision: int) -> None:
        for watch in list(self.watches):
            watch.notify(key, entry, revision)

    def subjects(self, prefix: str) -> str:
        """Return a filter that matches the keys with this prefix, and some others."""
        whole_tokens, dot, _ = prefix.rpartition(".")
        return f"{self._prefix}{whole_tokens}{dot}>"

    def key_of(self, message: StoredMessage) -> str:
        return message.subject.removeprefix(self._prefix)

    def entry_of(self, message: StoredMessage | None) -> Entry | None:
        """Return the record in a message. None for the marker of a deletion or expiry, and for a message that is not a
        record: a client made the server publish a message of another stream here, as the response to a request."""
        if message is None or not message.headers.keys().isdisjoint(_NO_RECORD):
            return None
        return Entry(self.key_of(message), message.payload, message.seq)


class Watch:
    """Watch of a bucket, made by `KeyValue.watch`. It opens a Feed, which delivers the snapshot, then changes, until it
    is lost; then it opens the next."""

    def __init__(self, kv: KeyValue, prefix: str, on_change: Callable[[str, Entry | None], None]) -> None:
        self._kv = kv
        self._prefix = prefix
        self._on_change = on_change
        self._known: set[str] = set()
        self._snapshot_keys: set[str] | None = None  # keys of a snapshot that is not complete yet
        self._missing: set[str] = set()  # known keys that the last snapshot lacks
        self._seq = 0  # sequence of the Feed's last message; everything older has been reported or superseded
        self._reported_revisions: dict[str, int] = {}  # per key: revision reported before the Feed delivered it
        self._missing_task: asyncio.Task[None] | None = None
        self._damage_task: asyncio.Task[None] | None = None
        self._feed: Feed | None = None
        self._task: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._complete = asyncio.Event()

    def stop(self) -> None:
        self._kv.watches.discard(self)
        if self._task is not None:
            self._task.cancel()
        for task in (self._missing_task, self._damage_task):
            if task is not None:
                task.cancel()
        if self._feed is not None:
            self._feed.close()

    def notify(self, key: str, entry: Entry | None, revision: int) -> None:
        """Report `key` at `revision`, unless it or something newer was reported before. None: deleted."""
        if not key.startswith(self._prefix) or revision <= max(self._seq, self._reported_revisions.get(key, 0)):
            return
        self._reported_revisions[key] = revision
        self._report(key, entry)

    async def start(self) -> None:
        """Open the first Feed and wait for its snapshot. Call once. Raises PlatformError."""
        await self._open()
        self._kv.watches.add(self)
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
        self._snapshot_keys = set()
        self._seq, self._reported_revisions = 0, {}  # a recreated bucket counts from one again
        try:
            self._feed = await Feed.open(
                self._kv.bus, self._kv.stream, self._kv.subjects(self._prefix), self._on_message, self._on_lost,
                on_exhausted=self._on_exhausted,
            )  # fmt: skip
        except BaseException:
            self._lost.set()
            raise
        if not self._feed.pending:
            self._snapshot_done()

    def _on_lost(self, reason: str) -> None:
        log.info("reopening the watch of %s: %s", self._kv.bucket, reason)
        self._complete.clear()
        self._lost.set()

    def _on_message(self, message: StoredMessage, pending: int) -> None:
        assert self._feed is not None
        self._feed.take()
        self._seq = message.seq
        key = self._kv.key_of(message)
        reported = self._reported_revisions.get(key, 0)
        if message.seq >= reported:
            self._reported_revisions.pop(key, None)
        if key.startswith(self._prefix) and message.seq > reported:
            self._report(key, self._kv.entry_of(message))
        if not pending and self._snapshot_keys is not None and self._feed.is_open:
            self._snapshot_done()

    def _on_exhausted(self) -> None:
        self._damage_task = asyncio.create_task(self._log_damaged(), name=f"watch-{self._kv.bucket}-damaged")
        if self._snapshot_keys is not None:
            self._snapshot_done()

    async def _log_damaged(self) -> None:
        """Log the keys that the server counts but cannot read."""
        with contextlib.suppress(PlatformError):
            for key in await self._kv.damaged(self._prefix, self._known):
                log.error("%s/%s is damaged on the disk of the message bus, and missing here", self._kv.bucket, key)

    def _snapshot_done(self) -> None:
        snapshot_keys, self._snapshot_keys = self._snapshot_keys or set(), None
        self._missing = self._known - snapshot_keys
        if self._missing and (self._missing_task is None or self._missing_task.done()):
            self._missing_task = asyncio.create_task(self._check_missing(), name=f"watch-{self._kv.bucket}-missing")
        self._complete.set()

    async def _check_missing(self) -> None:
        """Check missing keys with the leader: a record that changed during the snapshot arrives after it, so only the
        leader knows which keys have vanished."""
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
                    self._report(key, None)

    def _report(self, key: str, entry: Entry | None) -> None:
        if entry is None and key not in self._known:
            return
        self._missing.discard(key)
        if entry is None:
            self._known.discard(key)
        else:
            self._known.add(key)
            if self._snapshot_keys is not None:
                self._snapshot_keys.add(key)
        try:
            self._on_change(key, entry)
        except Exception:
            log.exception("a watcher of %s failed on %s", self._kv.bucket, key)
