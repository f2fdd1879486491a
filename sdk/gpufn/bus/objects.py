"""Blobs named by the sha256 of their bytes: bundles, models, engines.

The layout is that of NATS object stores, so other clients can read it: chunks of 1 MiB on `$O.<bucket>.C.<upload>`, one
description on `$O.<bucket>.M.<name>`. The transfer is our own: nats-py's holds everything twice, reads at 5-50 MB/s and
hangs when a chunk is gone.

put   1. chunks, a window of them in flight   2. the description, create-only: whoever comes second removes his chunks
get   1. the description   2. batches of chunks, asked for by sequence   3. size and digest must match
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets

import msgspec

from gpufn.bus import jetstream, streams
from gpufn.bus.connection import Bus, Message
from gpufn.errors import ArtifactUnavailable, BusUnavailable, Conflict

_CHUNK = 1 << 20
_WINDOW = 8
_STALLED_S = 10.0
_NANO = 1_000_000_000


class _Info(msgspec.Struct):
    name: str
    bucket: str
    nuid: str
    size: int
    chunks: int
    digest: str
    deleted: bool = False


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def ensure_bucket(bus: Bus, bucket: str) -> None:
    config = {
        "subjects": [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
        "storage": "file",
        "discard": "new",
        "allow_rollup_hdrs": True,
        "allow_direct": True,
    }
    await streams.ensure_stream(bus, f"OBJ_{bucket}", config)


async def put(bus: Bus, bucket: str, data: bytes) -> str:
    """Store `data` unless it is there; returns its digest. The bucket must exist (`ensure_bucket`)."""
    digest = await asyncio.to_thread(digest_of, data)
    if await exists(bus, bucket, digest):
        return digest
    upload = secrets.token_hex(11)
    subject = f"$O.{bucket}.C.{upload}"
    chunks = await _send_chunks(bus, subject, upload, data)
    info = _Info(digest, bucket, upload, len(data), chunks, _wire_digest(digest))
    try:
        await bus.publish_stored(_info_subject(bucket, digest), msgspec.json.encode(info), expected_last=0)
    except Conflict:
        await streams.purge(bus, f"OBJ_{bucket}", subject)  # somebody else stored the same bytes meanwhile
    return digest


async def get(bus: Bus, bucket: str, digest: str) -> bytes:
    """Raises ArtifactUnavailable when the blob is absent, incomplete or damaged."""
    info = await _info(bus, bucket, digest)
    if info is None:
        raise ArtifactUnavailable(f"{bucket} has no {digest[:12]}.")
    data = await _read_chunks(bus, bucket, info)
    if len(data) != info.size or await asyncio.to_thread(digest_of, data) != digest:
        raise ArtifactUnavailable(f"{digest[:12]} in {bucket} is damaged: put it again.")
    return data


async def exists(bus: Bus, bucket: str, digest: str) -> bool:
    return await _info(bus, bucket, digest) is not None


async def delete(bus: Bus, bucket: str, digest: str) -> None:
    """Absent is fine."""
    info = await _info(bus, bucket, digest)
    if info is not None:
        await streams.purge(bus, f"OBJ_{bucket}", _info_subject(bucket, digest))
        await streams.purge(bus, f"OBJ_{bucket}", f"$O.{bucket}.C.{info.nuid}")


async def _send_chunks(bus: Bus, subject: str, upload: str, data: bytes) -> int:
    gate = asyncio.Semaphore(_WINDOW)

    async def send(number: int, chunk: bytes) -> int:
        try:
            # The id keeps a chunk single when the fate of its first sending is unknown.
            return (await bus.publish_stored(subject, chunk, msg_id=f"{upload}-{number}", timeout_s=_STALLED_S)).seq
        finally:
            gate.release()

    sent: list[asyncio.Task[int]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for number, at in enumerate(range(0, len(data), _CHUNK)):
                await gate.acquire()
                sent.append(tasks.create_task(send(number, data[at : at + _CHUNK]), name=f"{upload}-{number}"))
    except* BusUnavailable as errors:
        raise BusUnavailable(f"Storing a blob broke off: {errors.exceptions[0]}") from errors
    places = [task.result() for task in sent]
    if places != sorted(places):  # one was sent again, behind its successors
        raise BusUnavailable("Storing a blob was disturbed: put it again.")
    return len(sent)


async def _read_chunks(bus: Bus, bucket: str, info: _Info) -> bytes:
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    inbox = bus.new_inbox()
    subscription = bus.subscribe(inbox, arrived.put_nowait)
    parts: list[bytes] = []
    next_seq, missing = 1, info.chunks
    incomplete = ArtifactUnavailable(f"{info.name[:12]} in {bucket} lacks chunks: put it again.")
    try:
        while missing:
            batch = min(missing, _WINDOW)
            body = {"seq": next_seq, "next_by_subj": f"$O.{bucket}.C.{info.nuid}", "batch": batch}
            bus.publish(f"{jetstream.API}DIRECT.GET.OBJ_{bucket}", msgspec.json.encode(body), reply=inbox)
            # The batch, then a notice: 204 at its end, 404 when nothing matches, 503 without a bucket.
            while not (message := await _next(arrived, bucket)).status:
                parts.append(message.payload)
                missing -= 1
                next_seq = int((message.headers or {})["Nats-Sequence"]) + 1
                batch -= 1
            if batch:
                raise incomplete
    finally:
        subscription.unsubscribe()
    return b"".join(parts)


async def _next(arrived: asyncio.Queue[Message], bucket: str) -> Message:
    try:
        async with asyncio.timeout(_STALLED_S):
            return await arrived.get()
    except TimeoutError:
        raise BusUnavailable(f"Reading from {bucket} stalled for {_STALLED_S:g} s.") from None


async def _info(bus: Bus, bucket: str, digest: str) -> _Info | None:
    message = await streams.last_message(bus, f"OBJ_{bucket}", _info_subject(bucket, digest))
    if message is None:
        return None
    info = msgspec.json.decode(message.payload, type=_Info)
    return None if info.deleted else info


def _info_subject(bucket: str, digest: str) -> str:
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(digest.encode()).decode()}"


def _wire_digest(digest: str) -> str:
    return f"SHA-256={base64.urlsafe_b64encode(bytes.fromhex(digest)).decode()}"
