"""Webhook payload: how a call ended, and its result if it is small JSON. Other protocols have their own payloads."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from gpufn_core.encoding import media
from gpufn_core.protocol.records import CallRecord
from gpufn_gateway.submitted import call_views

MAX_RESULT_BYTES: Final = 256 << 10


class Payload(NamedTuple):
    """The body of a webhook, and its headers other than the signature."""

    body: bytes
    headers: dict[str, str] = {"content-type": media.JSON}  # noqa: RUF012  never changed


# Arguments: the record of an ended call and its result, which is empty if it is too large for the record.
EncodePayload = Callable[[CallRecord, bytes], Payload]


def encode_payload(record: CallRecord, result: bytes) -> bytes:
    """Return the JSON. `type` is ``invocation.<state>``. `data.result` is present for JSON up to 256 KiB, otherwise
    `data.links.result` points to it."""
    ended_at = datetime.datetime.fromtimestamp(record.ended_at or 0.0, datetime.UTC)
    error = record.error
    data: dict[str, Any] = {
        "id": record.id,
        "function": f"{record.function}.{record.method}" if record.method else record.function,
        "revision": record.revision,
        "state": record.state,
        "submitted_at": record.submitted_at,
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "attempt": record.attempt,
        "error": None if error is None else msgspec.structs.replace(error, traceback=None),
        "links": call_views.links(record.id),
    }
    if record.content_type == media.JSON and 0 < len(result) <= MAX_RESULT_BYTES:
        data["result"] = msgspec.Raw(result)
    payload = {
        "type": f"invocation.{record.state}",
        "timestamp": ended_at.isoformat().replace("+00:00", "Z"),
        "data": data,
    }
    return msgspec.json.encode(payload)
