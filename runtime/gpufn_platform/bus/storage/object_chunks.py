"""The chunks of a blob: how its bytes are sent, regrouped and read, with a window of chunks in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import msgspec

from gpufn_core.errors import ArtifactUnavailable, BusUnavailable, InvalidInput
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.jetstream import Stored
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.hashing import Sha256
from gpufn_platform.bus.storage.object_info import BlobInfo

CHUNK: Final = 1 << 20
_WINDOW: Final = 8
_STALLED_S: Final = 10.0


async def send(bus: Bus, subject: str, upload: str, chunks: AsyncIterator[bytes], ttl_s: float | None) -> int:
    """Store the chunks; returns their number. Raises BusUnavailable."""
    in_flight: deque[asyncio.Task[Stored]] = deque()
    count = last_seq = 0

    async def wait_for_oldest() -> None:
        nonlocal last_seq
        seq = (await in_flight.popleft()).seq
        if seq < last_seq:  # this chunk was retried and is stored behind its successors
            raise BusUnavailable("The chunks of a blob were stored out of order: put it again.")
        last_seq = seq

    try:
        async for chunk in chunks:
            if len(in_flight) == _WINDOW:
                await wait_for_oldest()
            # The id deduplicates a chunk whose first send has an unknown outcome.
            sending = bus.publish_stored(subject, chunk, msg_id=f"{upload}-{count}", ttl_s=ttl_s, timeout_s=_STALLED_S)
            in_flight.append(asyncio.create_task(sending, name=f"{upload}-{count}"))
            count += 1
        while in_flight:
            await wait_for_oldest()
    except BusUnavailable as error:
        raise type(error)(f"Storing a blob failed: {error}") from error
    finally:  # chunks in flight would arrive after a purge
        await asyncio.gather(*in_flight, return_exceptions=True)
    return count


async def regroup(parts: AsyncIterator[bytes], size: int, sha256: Sha256) -> AsyncGenerator[bytes, None]:
    """Regroup the bytes into whole chunks and add each to `sha256`. Raises InvalidInput at the end, or once there are
    too many bytes."""
    remaining, buffer = size, bytearray()

    async def take(length: int) -> bytes:
        chunk = bytes(memoryview(buffer)[:length])
        del buffer[:length]
        await sha256.add(chunk)
        return chunk

    async for part in parts:
        remaining -= len(part)
        if remaining < 0:
            break
        buffer += part
        while len(buffer) >= CHUNK:
            yield await take(CHUNK)
    if remaining:
        raise InvalidInput(f"There are {'more' if remaining < 0 else 'fewer'} bytes than the {size:,} announced.")
    if buffer:
        yield await take(len(buffer))


async def read(bus: Bus, bucket: str, stream: str, info: BlobInfo) -> AsyncGenerator[bytes, None]:
    """Iterate over the chunks of a blob. Raises ArtifactUnavailable if one is missing, BusUnavailable."""
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    inbox = bus.new_inbox()
    subscription = bus.subscribe(inbox, arrived.put_nowait)
    next_seq, missing = 1, info.chunks
    incomplete = ArtifactUnavailable(f"{info.name[:12]} in {bucket} lacks chunks: put it again.")
    try:
        while missing:
            batch = min(missing, _WINDOW)
            body = {"seq": next_seq, "next_by_subj": f"$O.{bucket}.C.{info.nuid}", "batch": batch}
            bus.publish(f"{jetstream.API}DIRECT.GET.{stream}", msgspec.json.encode(body), reply=inbox)
            # The server sends the batch, then a notice: 204 at its end, 404 if nothing matches, 503 if no node answers.
            while not (message := await _next(arrived, bucket)).status:
                yield message.payload
                missing -= 1
                next_seq = int((message.headers or {})["Nats-Sequence"]) + 1
                batch -= 1
            if message.status == 503:
                raise BusUnavailable(f"{bucket} cannot be read: no server node answers for it.")
            if batch:  # in a cluster, the node that answered may lag behind
                chunk = await streams.next_message(bus, stream, f"$O.{bucket}.C.{info.nuid}", next_seq)
                if chunk is None:
                    raise incomplete
                yield chunk.payload
                missing, next_seq = missing - 1, chunk.seq + 1
    finally:
        subscription.unsubscribe()


async def _next(arrived: asyncio.Queue[Message], bucket: str) -> Message:
    try:
        async with asyncio.timeout(_STALLED_S):
            return await arrived.get()
    except TimeoutError:
        raise BusUnavailable(f"Reading from {bucket} stalled for {_STALLED_S:g} s.") from None
