"""Startup check that gpufn can run on this NATS server. A gateway runs it once, before anything else."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

from gpufn_core.errors import BusUnavailable, ProtocolMismatch
from gpufn_core.protocol import subjects
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus, JetStreamError, Message
from gpufn_platform.bus.storage import streams

_MIN_VERSION = (2, 12)  # per-message TTL 2.11, atomic batches 2.12
_ACK_TOKENS = 9
_TIMEOUT_S = 5.0


async def check_server(bus: Bus) -> None:
    """Raises ProtocolMismatch if the server is too old, or configured so that clients misread its acknowledgements.

    The server's INFO does not include the acknowledgement format (`js_ack_fc_v2`), so the check stores one message and
    receives it, in a memory stream used only for this.
    """
    version = str(bus.server_info.get("version", "0"))
    if tuple(int(part) for part in version.partition("-")[0].split(".")[:2]) < _MIN_VERSION:
        raise ProtocolMismatch(f"nats-server {version} is too old: gpufn needs 2.12 or newer.")
    if not bus.server_info.get("jetstream"):
        raise ProtocolMismatch("This nats-server runs without JetStream: add `jetstream {}` to its configuration.")
    tokens = await _ack_tokens(bus)
    if tokens != _ACK_TOKENS:
        raise ProtocolMismatch(
            f"This nats-server uses an acknowledgement format of {tokens} tokens, which clients misread: "
            "set `feature_flags { js_ack_fc_v2: false }` in its configuration and restart it."
        )


async def _ack_tokens(bus: Bus) -> int:
    config = {"subjects": [subjects.PROBE_FILTER], "storage": "memory", "max_msgs": 1, "discard": "old"}
    await streams.ensure_stream(bus, subjects.PROBE, config)
    await bus.publish_stored(subjects.PROBE_FILTER, b"", msg_id=None)
    name = f"probe-{secrets.token_hex(8)}"
    consumer = {"name": name, "ack_policy": "none", "deliver_policy": "last", "inactive_threshold": 5_000_000_000}
    request = {"stream_name": subjects.PROBE, "config": consumer, "action": "create"}
    await bus.js(f"CONSUMER.CREATE.{subjects.PROBE}.{name}", request)
    deliveries: asyncio.Queue[Message] = asyncio.Queue()
    inbox = bus.new_inbox()
    subscription = bus.subscribe(inbox, deliveries.put_nowait)
    try:
        bus.publish(f"{jetstream.API}CONSUMER.MSG.NEXT.{subjects.PROBE}.{name}", b'{"batch":1}', reply=inbox)
        async with asyncio.timeout(_TIMEOUT_S):
            message = await deliveries.get()
        if message.status:  # in a cluster, the consumer's node may not have the message yet
            raise BusUnavailable(f"The message bus did not deliver a probe: {message.status} {message.description}.")
    except TimeoutError:
        raise BusUnavailable(f"The message bus did not deliver a probe within {_TIMEOUT_S:g} s.") from None
    finally:
        subscription.unsubscribe()
        with contextlib.suppress(BusUnavailable, JetStreamError):
            await bus.js(f"CONSUMER.DELETE.{subjects.PROBE}.{name}")
    return len(message.reply.split("."))
