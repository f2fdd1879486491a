"""JetStream's requests and answers, as far as they are pure: headers out, acknowledgements and errors in."""

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
NO_SEQUENCE = 10043  # what a stream in memory says of a message that is gone
NOT_FOUND = (10014, NO_MESSAGE, NO_SEQUENCE, 10059)  # consumer, message, sequence, stream
DELETE_FAILED = 10057
NO_PEERS = 10005  # a cluster has not as many nodes as a stream is to have


class NoResponders(BusUnavailable):
    """Nobody listens on this subject."""


class Unanswered(BusUnavailable):
    """Whoever listens on this subject was asked, and said nothing in time."""


class NotStored(BusUnavailable):
    """The server has what was published, and does not say that it is stored: one whose disk is full says nothing."""


class JetStreamError(PlatformError):
    """JetStream refused a request; `err_code` is NATS's own."""

    def __init__(self, message: str | None = None, *, err_code: int = 0, status: int = 0) -> None:
        super().__init__(message)
        self.err_code = err_code
        self.status = status


class Stored(msgspec.Struct, frozen=True):
    """Where a published message was stored; `duplicate` when its id was known already."""

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
    """Headers for a message that a stream shall store.

    `msg_id`: stored once within the stream's window. `expected_last`: only if this is the subject's newest sequence
    (0: there is none). `ttl_s`: removed after so long; the server counts whole seconds, so it is rounded up.
    """
    headers = {}
    if msg_id is not None:
        headers["Nats-Msg-Id"] = msg_id
    if expected_last is not None:
        headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_last)
    if ttl_s is not None:
        headers["Nats-TTL"] = f"{max(1, math.ceil(ttl_s))}s"
    return headers


def batch_headers(batch: str, place: int) -> dict[str, str]:
    """Headers of the message at `place`, from 1, in a batch that is stored whole or not at all."""
    return {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(place)}


def commit_headers(expected_last: int) -> dict[str, str]:
    """What the last message of a batch has beside them; see `store_headers`."""
    return {"Nats-Batch-Commit": "1", **store_headers(expected_last=expected_last)}


def pub_ack(stored: Stored) -> bytes:
    """What a server says of a stored message, to tell it to somebody else."""
    return msgspec.json.encode({"stream": stored.stream, "seq": stored.seq})


def read_pub_ack(payload: bytes, subject: str) -> Stored:
    """Raises QueueFull, Conflict, or another error of ours when the message was not stored."""
    ack = _pub_ack.decode(payload)
    if (error := ack.error) is None:
        return Stored(ack.stream, ack.seq, ack.duplicate)
    if error.err_code in WRONG_LAST_SEQUENCE:
        raise Conflict(f"{subject} was changed by somebody else: {error.description}.")
    if error.err_code == STORE_FAILED and "maximum" in error.description:
        raise QueueFull(f"{subject} is full: {error.description}.")
    if error.code == 503:
        raise BusUnavailable(f"The message bus cannot store {subject}: {error.description}.")
    raise JetStreamError(f"{subject}: {error.description}", err_code=error.err_code, status=error.code)


def read_answer(payload: bytes, verb: str) -> dict[str, Any]:
    """Raises JetStreamError, or BusUnavailable when nobody can decide it now."""
    answer = _any.decode(payload)
    if error := answer.get("error"):
        said = f"{verb}: {error.get('description', 'failed')}"
        if error.get("code") == 503:
            raise BusUnavailable(f"The message bus cannot answer {said}.")
        raise JetStreamError(said, err_code=error.get("err_code", 0), status=error.get("code", 0))
    return answer
