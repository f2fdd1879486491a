"""JetStream request headers, acknowledgements and errors. Pure."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gpufn_core.errors import BusUnavailable, Conflict, PlatformError, QueueFull

API = "$JS.API."

WRONG_LAST_SEQUENCE = (10071, 10164)
STORE_FAILED = 10077
STREAM_NAME_IN_USE = 10058
NO_MESSAGE = 10037
NO_SEQUENCE = 10043  # a memory stream's code for a deleted message
NOT_FOUND = (10014, NO_MESSAGE, NO_SEQUENCE, 10059)  # consumer, message, sequence, stream
DELETE_FAILED = 10057
NO_PEERS = 10005  # the cluster has fewer nodes than the stream's replicas


class NoResponders(BusUnavailable):
    """The subject has no subscriber."""


class RequestTimeout(BusUnavailable):
    """No subscriber of the subject responded within the timeout."""


class NotStored(BusUnavailable):
    """The server received a message and did not acknowledge it; a server with a full disk sends no acknowledgement."""


class JetStreamError(PlatformError):
    """JetStream refused a request. `err_code` is the NATS error code."""

    def __init__(self, message: str | None = None, *, err_code: int = 0, status: int = 0) -> None:
        super().__init__(message)
        self.err_code = err_code
        self.status = status


class Stored(msgspec.Struct, frozen=True):
    """Where a published message is stored. `duplicate`: the stream already had a message with its id."""

    stream: str
    seq: int
    duplicate: bool = False


class _Error(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _PubAck(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _Error | None = None


_pub_ack = msgspec.json.Decoder(_PubAck)
_any = msgspec.json.Decoder(dict[str, Any])


def store_headers(
    *, msg_id: str | None = None, expected_last: int | None = None, ttl_s: float | None = None
) -> dict[str, str]:
    """Headers for a message to a stream.

    `msg_id`: the stream stores it once within its duplicate window. `expected_last`: store only if this is the
    subject's last sequence (0: the subject is empty). `ttl_s`: expires after this time, rounded up to whole seconds for
    the server.
    """
    headers = {}
    if msg_id is not None:
        headers["Nats-Msg-Id"] = msg_id
    if expected_last is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_last)
    if ttl_s is not None:
        headers["Nats-TTL"] = f"{max(1, math.ceil(ttl_s))}s"
    return headers


def batch_headers(batch: str, position: int) -> dict[str, str]:
    """Headers of the message at `position`, from 1, in an atomic batch."""
    return {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(position)}


def pub_ack(stored: Stored) -> bytes:
    """Encode the server's acknowledgement of a stored message, for forwarding to another process."""
    return msgspec.json.encode({"stream": stored.stream, "seq": stored.seq})


def read_pub_ack(payload: bytes, subject: str) -> Stored:
    """Decode a publish acknowledgement. Raises QueueFull, Conflict or another PlatformError if nothing was stored."""
    ack = _pub_ack.decode(payload)
    if (error := ack.error) is None:
        return Stored(ack.stream, ack.seq, ack.duplicate)
    if error.err_code in WRONG_LAST_SEQUENCE:
        raise Conflict(f"{subject} was changed concurrently: {error.description}.")
    if error.err_code == STORE_FAILED and "maximum" in error.description:
        raise QueueFull(f"{subject} is full: {error.description}.")
    if error.code == 503:
        raise BusUnavailable(f"The message bus cannot store {subject}: {error.description}.")
    raise JetStreamError(f"{subject}: {error.description}", err_code=error.err_code, status=error.code)


def read_response(payload: bytes, verb: str) -> dict[str, Any]:
    """Decode an API response. Raises JetStreamError, or BusUnavailable if the server cannot decide now."""
    response = _any.decode(payload)
    if error := response.get("error"):
        detail = f"{verb}: {error.get('description', 'failed')}"
        if error.get("code") == 503:
            raise BusUnavailable(f"The message bus cannot answer {detail}.")
        raise JetStreamError(detail, err_code=error.get("err_code", 0), status=error.get("code", 0))
    return response
