"""Stream configurations for invocations, results and logs, and queries on streams.

Gateways create the streams, at every start and after every reconnect: SYNC is in the server's memory and is lost with
the server. Processes of a node may not create streams; at startup they wait for the streams that they need
(`wait_for`).

A message older than its stream's `max_age` disappears silently, even while its invocation runs: then it is no longer
counted, and it is not redelivered when its runner dies. So an invocation's stream keeps messages longer than any
deadline.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

import msgspec

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_core.protocol.data import MAX_ITEMS
from gpufn_platform.bus import jetstream, nats_protocol
from gpufn_platform.bus.connection import Bus, JetStreamError, Message
from gpufn_platform.bus.storage.async_reader import Follower
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

log = logging.getLogger(__name__)

MAX_WAITING = 2_000  # calls with a waiting client; a longer queue means minutes: 429 serves the caller better
MAX_QUEUED = 2_000_000  # submitted calls; queued messages cost disk but no memory
_WAIT_S = 0.1
_REPLICAS = 3  # in a cluster; tolerates the loss of one node
_SECOND = 1_000_000_000  # JetStream counts nanoseconds
_MINUTE = 60 * _SECOND
_DAY = 24 * 60 * _MINUTE
_MIB = 1 << 20
_LATEST = 253_402_300_000.0  # for a date

_QUEUE: dict[str, Any] = {
    "retention": "workqueue",
    "discard": "new",
    "discard_new_per_subject": True,
    "allow_msg_ttl": True,
}
_RECORD: dict[str, Any] = {"retention": "limits", "discard": "old", "storage": "file", "compression": "s2"}

STREAMS: Mapping[str, dict[str, Any]] = {
    subjects.SYNC: {
        **_QUEUE,
        "subjects": [subjects.SYNC_FILTER],
        "storage": "memory",
        "max_msgs_per_subject": MAX_WAITING,
        "max_bytes": 512 * _MIB,
        "max_age": 15 * _DAY,  # seven days queued, seven days running, and one to spare
        "duplicate_window": 2 * _MINUTE,
    },
    subjects.ASYNC: {
        **_QUEUE,
        "subjects": [subjects.ASYNC_FILTER, subjects.MAPS_FILTER],
        "storage": "file",
        "compression": "s2",
        "allow_direct": True,
        "allow_atomic": True,  # map: a chunk is stored completely or not at all
        "max_msgs_per_subject": MAX_QUEUED,
        "max_bytes": 16_384 * _MIB,
        "max_age": 30 * _DAY,  # as long as call records
        "duplicate_window": 10 * _MINUTE,
    },
    subjects.BUILD: {
        **_QUEUE,
        "subjects": [subjects.BUILD_FILTER],
        "storage": "file",
        "max_msgs_per_subject": 10_000,
        "max_age": 7 * _DAY,
        "duplicate_window": 10 * _MINUTE,
    },
    subjects.WEBHOOKS: {
        **_QUEUE,
        "subjects": [subjects.WEBHOOKS_FILTER],
        "discard": "old",  # a full queue must not keep calls from ending
        "discard_new_per_subject": False,
        "storage": "file",
        "max_bytes": 1_024 * _MIB,
        "max_age": 7 * _DAY,
        "duplicate_window": 2 * _MINUTE,
    },
    subjects.QUEUES: {
        **_QUEUE,
        "subjects": [subjects.QUEUES_FILTER],
        "storage": "file",
        "compression": "s2",
        "allow_direct": True,
        "max_msgs_per_subject": MAX_ITEMS,
        "max_bytes": 4_096 * _MIB,
        "max_age": 7 * _DAY,
        "duplicate_window": 2 * _MINUTE,
    },
    subjects.RESULTS: {
        **_RECORD,
        "subjects": [subjects.RESULTS_FILTER],
        "allow_direct": True,
        "max_msgs_per_subject": 1,
        "allow_msg_ttl": True,  # each record carries its own retention; max_age is for records without
        "max_bytes": 16_384 * _MIB,
        "max_age": 30 * _DAY,
        "duplicate_window": 2 * _MINUTE,
    },
    subjects.CHECKPOINTS: {
        **_RECORD,
        "subjects": [subjects.CHECKPOINTS_FILTER],
        "max_msgs_per_subject": 1,
        "max_bytes": 16_384 * _MIB,
        "max_age": 14 * _DAY,  # as long as a call may be in ASYNC
        "duplicate_window": 2 * _MINUTE,
    },
    subjects.DEAD_LETTERS: {
        **_RECORD,
        "subjects": [subjects.DEAD_LETTERS_FILTER],
        "max_msgs_per_subject": 1,
        "max_bytes": 4_096 * _MIB,
        "max_age": 14 * _DAY,
        "duplicate_window": 2 * _MINUTE,
    },
    subjects.AUDIT: {
        **_RECORD,
        "subjects": [subjects.AUDIT_FILTER],
        "allow_direct": True,
        "deny_delete": True,
        "deny_purge": True,
        "max_bytes": 1_024 * _MIB,
        "max_age": 400 * _DAY,  # a year, and a month to export it
        "duplicate_window": 10 * _MINUTE,
    },
    subjects.HISTORY: {
        **_RECORD,
        "subjects": [subjects.HISTORY_FILTER],
        "allow_direct": True,
        "max_bytes": 32 * _MIB,  # the leader removes the finest messages first, before this is reached
        "max_age": 31 * _DAY,
        "duplicate_window": 2 * _MINUTE,
    },
    subjects.LOGS: {
        **_RECORD,
        "subjects": [subjects.LOGS_FILTER],
        "max_msgs_per_subject": 20_000,
        "max_bytes": 1_024 * _MIB,
        "max_age": 7 * _DAY,
        "duplicate_window": 2 * _MINUTE,
    },
}


class Depth(msgspec.Struct, frozen=True):
    """Invocations stored for one revision: queued and running."""

    sync: int = 0
    asynchronous: int = 0

    @property
    def total(self) -> int:
        return self.sync + self.asynchronous


async def ensure_stream(bus: Bus, name: str, config: Mapping[str, Any]) -> None:
    """Create the stream, or update it to this configuration. In a cluster it has three replicas."""
    body = {"name": name, **config}
    if bus.server_info.get("cluster"):
        try:
            await _ensure(bus, {"num_replicas": _REPLICAS, **body})
        except JetStreamError as error:
            if error.err_code != jetstream.NO_PEERS:
                raise
            log.warning("%s has only one replica in the bus's cluster: %s", name, error.message)
        else:
            return
    await _ensure(bus, body)


async def _ensure(bus: Bus, body: dict[str, Any]) -> None:
    created = await bus.js_or_none(f"STREAM.CREATE.{body['name']}", body, codes=(jetstream.STREAM_NAME_IN_USE,))
    if created is None:
        await bus.js(f"STREAM.UPDATE.{body['name']}", body)


async def ensure_streams(bus: Bus) -> None:
    for name, config in STREAMS.items():
        await ensure_stream(bus, name, config)


async def wait_for(bus: Bus, names: Iterable[str]) -> None:
    """Return once these streams exist: a gateway may start later. Raises BusUnavailable, JetStreamError."""
    has_logged = False
    for name in names:
        while await bus.js_or_none(f"STREAM.INFO.{name}") is None:
            if not has_logged:
                has_logged = True
                log.info("waiting for a gateway to create %s", name)
            await asyncio.sleep(_WAIT_S)


async def server_time(bus: Bus, stream: str, *, timeout_s: float = 5.0) -> float:
    """Return the wall clock, in unix seconds, of the server that leads `stream`."""
    info = await bus.js(f"STREAM.INFO.{stream}", timeout_s=timeout_s)
    return datetime.datetime.fromisoformat(info["ts"]).timestamp()


async def change_mark(bus: Bus, stream: str) -> tuple[int, int]:
    """Return a value that differs after a message was stored or removed."""
    state = (await bus.js(f"STREAM.INFO.{stream}"))["state"]
    return int(state["last_seq"]), int(state["messages"])


async def depths(bus: Bus) -> dict[tuple[str, int], Depth]:
    """Count queued and running invocations per (function, revision). Raises rather than omit a count: a missing number
    must never look like zero."""
    sync = await _counts(bus, subjects.SYNC, subjects.SYNC_FILTER)
    asynchronous = await _counts(bus, subjects.ASYNC, subjects.ASYNC_FILTER)
    return {owner: Depth(sync.get(owner, 0), asynchronous.get(owner, 0)) for owner in sync.keys() | asynchronous.keys()}


async def _counts(bus: Bus, stream: str, queues: str) -> dict[tuple[str, int], int]:
    counts: dict[tuple[str, int], int] = {}
    for subject, count in (await messages_per_subject(bus, stream, queues)).items():
        owner = subjects.queue_owner(subject)
        counts[owner] = counts.get(owner, 0) + count
    return counts


async def messages_per_subject(bus: Bus, stream: str, subject: str = ">") -> dict[str, int]:
    """Count the stored messages per subject that matches `subject`."""
    counts: dict[str, int] = {}
    offset = 0
    while True:
        info = await bus.js(f"STREAM.INFO.{stream}", {"subjects_filter": subject, "offset": offset})
        page: dict[str, int] = info["state"].get("subjects") or {}
        counts |= page
        offset += len(page)
        # The server sends at most `limit` (100,000) subjects per response.
        if not page or offset >= info.get("total", 0):
            return counts


async def delete_message(bus: Bus, stream: str, seq: int) -> bool:
    """Remove one stored message; returns False if it no longer exists."""
    absent = (*jetstream.NOT_FOUND, jetstream.DELETE_FAILED)
    response = await bus.js_or_none(f"STREAM.MSG.DELETE.{stream}", {"seq": seq, "no_erase": True}, codes=absent)
    return response is not None and bool(response.get("success"))


async def last_message(bus: Bus, stream: str, subject: str) -> StoredMessage | None:
    """Return the newest message of `subject`, which may have wildcards. The leader answers: never stale."""
    return await _message(bus, stream, {"last_by_subj": subject})


async def message_at(bus: Bus, stream: str, seq: int) -> StoredMessage | None:
    """Return the message stored at `seq`. The leader answers: never stale."""
    return await _message(bus, stream, {"seq": seq}) if seq > 0 else None


async def batch_from(
    bus: Bus, stream: str, subject: str, seq: int, *, most: int, max_bytes: int, timeout_s: float = 5.0
) -> list[StoredMessage]:
    """Return the first messages of `subject`, which may have wildcards, at `seq` or later.

    At most `most` messages and `max_bytes` in total, but at least one if there is one. The stream must allow direct
    reads. In a cluster any node may answer; if a node that lags behind returns nothing, the leader returns one
    message.
    """
    messages: list[StoredMessage] = []
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_message(message: Message) -> None:
        headers = message.headers or {}
        if not message.status:
            at = datetime.datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp()
            sequence = int(headers["Nats-Sequence"])
            messages.append(StoredMessage(headers["Nats-Subject"], sequence, message.payload, headers, at))
        elif not done.done():
            if message.status in (204, 404):  # end of the batch; no message
                done.set_result(None)
            else:
                done.set_exception(BusUnavailable(f"{stream} cannot be read: {message.status} {message.description}."))

    inbox = bus.new_inbox()
    subscription = bus.subscribe(inbox, on_message)
    body = {"next_by_subj": subject, "seq": seq, "batch": most, "max_bytes": max_bytes}
    try:
        bus.publish(f"{jetstream.API}DIRECT.GET.{stream}", msgspec.json.encode(body), reply=inbox)
        async with asyncio.timeout(timeout_s):
            await done
    except TimeoutError:
        raise BusUnavailable(f"{stream} could not be read within {timeout_s:g} s.") from None
    finally:
        subscription.unsubscribe()
    if not messages and bus.server_info.get("cluster") and (message := await next_message(bus, stream, subject, seq)):
        return [message]
    return messages


async def next_message(bus: Bus, stream: str, subject: str, seq: int) -> StoredMessage | None:
    """Return the first message of `subject`, which may have wildcards, at sequence `seq` or later."""
    return await _message(bus, stream, {"next_by_subj": subject, "seq": seq})


async def first_sequence_at(bus: Bus, stream: str, at: float) -> int:
    """Return the sequence of the first message that was stored at `at` (unix seconds) or later, or the next one to be
    stored. The stream must allow direct reads."""
    start = datetime.datetime.fromtimestamp(min(max(at, 0.0), _LATEST), datetime.UTC)
    body = msgspec.json.encode({"start_time": start, "batch": 1})
    response = await bus.request_server(f"{jetstream.API}DIRECT.GET.{stream}", body)
    if not response.status:
        return int((response.headers or {})["Nats-Sequence"])
    return int((await bus.js(f"STREAM.INFO.{stream}"))["state"]["last_seq"]) + 1


async def count(bus: Bus, stream: str, subject: str) -> int:
    """Count the messages of `subject`, which may have wildcards. The stream must allow direct reads."""
    body = msgspec.json.encode({"seq": 1, "next_by_subj": subject, "batch": 1})
    response = await bus.request_server(f"{jetstream.API}DIRECT.GET.{stream}", body)
    return 0 if response.status else int((response.headers or {})["Nats-Num-Pending"]) + 1


class ConsumerProgress(msgspec.Struct, frozen=True):
    """Progress of a consumer: `waiting` messages not delivered yet, all of them after sequence `taken`."""

    waiting: int
    taken: int


async def consumed(bus: Bus, stream: str, consumer: str) -> ConsumerProgress | None:
    """Return the progress of a consumer, or None if the consumer does not exist."""
    if (info := await bus.js_or_none(f"CONSUMER.INFO.{stream}.{consumer}")) is None:
        return None
    return ConsumerProgress(int(info["num_pending"]), int(info["delivered"]["stream_seq"]))


async def _message(bus: Bus, stream: str, query: dict[str, Any]) -> StoredMessage | None:
    response = await bus.js_or_none(f"STREAM.MSG.GET.{stream}", query, codes=(jetstream.NO_MESSAGE,))
    if response is None:
        return None
    message = response["message"]
    headers = nats_protocol.parse_headers(base64.b64decode(message["hdrs"]))[0] if "hdrs" in message else None
    return StoredMessage(
        subject=message["subject"],
        seq=message["seq"],
        payload=base64.b64decode(message.get("data", "")),
        headers=headers or {},
        time=datetime.datetime.fromisoformat(message["time"]).timestamp(),
    )


async def purge(bus: Bus, stream: str, subject: str, *, below_seq: int | None = None, keep: int | None = None) -> int:
    """Remove the messages of `subject` (below a sequence, or all but the newest `keep`); returns their number."""
    body: dict[str, Any] = {"filter": subject}
    if keep is not None:
        body["keep"] = keep
    if below_seq is not None:
        body["seq"] = below_seq
    return int((await bus.js(f"STREAM.PURGE.{stream}", body))["purged"])


async def ensure_consumer(
    bus: Bus, stream: str, name: str, filter_subject: str, *, ack_wait_s: float, max_ack_pending: int
) -> None:
    """Create a durable pull consumer. It redelivers forever: retry limits are the invocation's own policy."""
    config = {
        "durable_name": name,
        "name": name,
        "filter_subject": filter_subject,
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "ack_wait": int(ack_wait_s * _SECOND),
        "max_deliver": -1,
        "max_ack_pending": max_ack_pending,
        "inactive_threshold": 60 * _MINUTE,
    }
    request = {"stream_name": stream, "config": config, "action": ""}
    await bus.js(f"CONSUMER.CREATE.{stream}.{name}.{filter_subject}", request)


async def delete_consumer(bus: Bus, stream: str, name: str) -> bool:
    """Delete a consumer. Return False if it is absent."""
    return await bus.js_or_none(f"CONSUMER.DELETE.{stream}.{name}") is not None


async def follow(bus: Bus, stream: str, subject: str, *, since_seq: int) -> AsyncGenerator[StoredMessage, None]:
    """Yield every message of `subject` from `since_seq` on, once and in order, forever; survives a lost server."""
    async with Follower(bus, stream, subject, since_seq) as follower:
        while True:
            yield await follower.next()
