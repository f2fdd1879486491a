"""Blobs named by the sha256 of their bytes: bundles, models, engines.

The layout is that of NATS object stores, so other clients can read it: chunks of 1 MiB on `$O.<bucket>.C.<upload>`, one
description on `$O.<bucket>.M.<name>`. The transfer is our own: nats-py's holds everything twice, reads at 5-50 MB/s and
hangs when a chunk is gone.

put   1. chunks, a window of them in flight   2. size and digest must match   3. the description, create-only: whoever
      comes second removes his chunks, as does whoever fails before. One that is of no use, for it cannot be read or its
      chunks are not all there, is replaced: what is damaged is whole again once it is put again
get   1. the description   2. batches of chunks, asked for by sequence   3. size and digest must match
keep  who is about to name a blob in a record touches it: its description is stored anew. Who removes what no record
      names spares the young, and removes the description that he saw: one that was touched meanwhile is another
own   a blob with an owner is his alone and expires with him: the owner is part of its name. What he keeps again has a
      time of its own, and is stored anew

A file or stream of any size takes the memory of two windows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from gpufn_core.errors import ArtifactUnavailable, BusUnavailable, Conflict, GpufnError, InvalidInput
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.jetstream import Stored
from gpufn_platform.bus.storage import object_info, ordered_reader, streams
from gpufn_platform.bus.storage.hashing import Sha256
from gpufn_platform.bus.storage.object_info import BlobInfo
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

_CHUNK: Final = 1 << 20
_WINDOW: Final = 8
_STALLED_S: Final = 10.0
_REPLACE: Final = {"Nats-Rollup": "sub"}
_MARKER_S: Final = 1.0  # the shortest time that the server knows


class Blob(msgspec.Struct, frozen=True):
    """A blob as `blobs` found it. `put_at`: when it was put or touched, in unix seconds by the server's clock."""

    digest: str
    size: int
    put_at: float
    upload: str
    seq: int


def stream_of(bucket: str) -> str:
    return f"OBJ_{bucket}"


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def ensure_bucket(bus: Bus, bucket: str, *, expires: bool = False, max_bytes: int | None = None) -> None:
    """`expires`: for blobs that have an owner. Beyond `max_bytes` nothing more is stored."""
    config: dict[str, Any] = {
        "subjects": [f"$O.{bucket}.C.>", f"$O.{bucket}.M.>"],
        "storage": "file",
        "discard": "new",
        "allow_rollup_hdrs": True,
        "allow_direct": True,
        "allow_msg_ttl": expires,
    }
    if max_bytes is not None:
        config["max_bytes"] = max_bytes
    await streams.ensure_stream(bus, stream_of(bucket), config)


async def put(bus: Bus, bucket: str, data: bytes, *, purges: bool = True) -> str:
    """Store `data` unless it is there; returns its digest. The bucket must exist (`ensure_bucket`); `purges` as for
    `put_file`."""
    digest = await asyncio.to_thread(digest_of, data)
    if not await touch(bus, bucket, digest):
        await _put(bus, bucket, digest, len(data), parts_of(data), purges=purges)
    return digest


async def put_file(bus: Bus, bucket: str, path: Path, *, purges: bool = True) -> tuple[str, bool]:
    """Store a file unless its bytes are there. Return their digest, and whether this call stored them.

    `purges` False: for a role that may not purge a stream. `remove_unfinished` removes what a failed upload leaves.
    Raises OSError when the file cannot be read.
    """
    size, digest = await asyncio.to_thread(_size_and_digest, path)
    is_new = not await touch(bus, bucket, digest)
    if is_new:
        async with contextlib.aclosing(_parts_of_file(path)) as parts:
            await _put(bus, bucket, digest, size, parts, purges=purges)
    return digest, is_new


async def put_stream(bus: Bus, bucket: str, digest: str, size: int, parts: AsyncIterator[bytes]) -> None:
    """Store what `parts`, of any lengths, are together.

    Raises InvalidInput when that is not `size` bytes with this `digest`; whatever is raised, no blob is left that looks
    whole and is not.
    """
    await _put(bus, bucket, digest, size, parts)


async def _put(
    bus: Bus,
    bucket: str,
    digest: str | None,
    size: int,
    parts: AsyncIterator[bytes],
    *,
    owner: str = "",
    ttl_s: float | None = None,
    purges: bool = True,
) -> str:
    """As `put_stream`. `digest` None: it is computed, and returned."""
    upload = secrets.token_hex(11)
    subject = f"$O.{bucket}.C.{upload}"
    sha256 = Sha256()
    try:
        async with contextlib.aclosing(_whole_chunks(parts, size, sha256)) as whole:
            chunks = await _send_chunks(bus, subject, upload, whole, ttl_s)
        digest = _same(await sha256.hexdigest(), digest)
    except BaseException:
        with contextlib.suppress(GpufnError):
            if purges:
                await streams.purge(bus, stream_of(bucket), subject)
            elif owner:
                await _roll_up(bus, subject)
        raise
    # What breaks off from here on leaves the chunks, for the description that names them may have been stored all the
    # same. If it was not, `remove_unfinished` finds them.
    info = BlobInfo(_name(digest, owner), bucket, upload, size, chunks, object_info.wire_digest(digest))
    if not await _describe(bus, info, ttl_s):
        if purges:
            await streams.purge(bus, stream_of(bucket), subject)
        elif owner:
            await _roll_up(bus, subject)
    return digest


async def check(digest: str, size: int, parts: AsyncIterator[bytes]) -> None:
    """Read `parts` to their end and store nothing. Raises InvalidInput, as `put_stream` does."""
    sha256 = Sha256()
    async with contextlib.aclosing(_whole_chunks(parts, size, sha256)) as whole:
        async for _ in whole:
            pass
    _same(await sha256.hexdigest(), digest)


async def get(bus: Bus, bucket: str, digest: str) -> bytes:
    """Raises ArtifactUnavailable when the blob is absent, incomplete or damaged."""
    async with contextlib.aclosing(_read_checked(bus, bucket, digest)) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def get_file(bus: Bus, bucket: str, digest: str, path: Path) -> None:
    """Write a blob to `path`, which is created or overwritten, and is gone again when anything is raised.

    It is incomplete until this returns: let `path` be a name that nobody looks for, and rename it. Raises
    ArtifactUnavailable when the blob is absent, incomplete, damaged, or cannot be written.
    """
    try:
        await _write(bus, bucket, digest, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(path.unlink, missing_ok=True)
        if isinstance(error, OSError):
            raise ArtifactUnavailable(f"{digest[:12]} cannot be written to {path}: {error.strerror}.") from error
        raise


async def keep_file(bus: Bus, bucket: str, path: Path, *, owner: str, ttl_s: float | None) -> tuple[str, int]:
    """Store a file for one owner, for so long, or until it is deleted; returns its digest and size. It is read once:
    what he kept before is not looked for. Raises OSError when it cannot be read, InvalidInput when it grows or shrinks
    meanwhile."""
    size = (await asyncio.to_thread(path.stat)).st_size
    async with contextlib.aclosing(_parts_of_file(path)) as parts:
        digest = await _put(bus, bucket, None, size, parts, owner=owner, ttl_s=ttl_s, purges=False)
    return digest, size


async def keep_stream(
    bus: Bus, bucket: str, size: int, parts: AsyncIterator[bytes], *, owner: str, ttl_s: float | None
) -> str:
    """As `keep_file`, of what `parts` are together; returns the digest."""
    return await _put(bus, bucket, None, size, parts, owner=owner, ttl_s=ttl_s, purges=False)


def read(bus: Bus, bucket: str, digest: str, *, owner: str = "") -> AsyncGenerator[bytes, None]:
    """A blob's bytes as they come. Raises ArtifactUnavailable, before the first or instead of the end."""
    return _read_checked(bus, bucket, digest, owner)


async def exists(bus: Bus, bucket: str, digest: str) -> bool:
    there = await _description(bus, bucket, digest)
    return there is not None and await _is_whole(bus, there)


async def verify(bus: Bus, bucket: str, digest: str) -> bool:
    """Whether a blob is there and its bytes are what was put: all of them are read. One that is damaged goes, or it
    would be taken for there when it is put again."""
    there = await _description(bus, bucket, digest)
    try:
        async with contextlib.aclosing(_read_checked(bus, bucket, digest)) as chunks:
            async for _ in chunks:
                pass
    except ArtifactUnavailable:
        if there is not None:  # not one that was put meanwhile
            await streams.delete_message(bus, stream_of(bucket), there.seq)
        return False
    return True


async def touch(bus: Bus, bucket: str, digest: str) -> bool:
    """Whether a blob is there, with all of its chunks; if it is, it is as young as one that was put just now."""
    while (there := await _description(bus, bucket, digest)) is not None and await _is_whole(bus, there):
        with contextlib.suppress(Conflict):
            await bus.publish_stored(there.subject, there.payload, expected_last=there.seq, headers=_REPLACE)
            return True
    return False


async def blobs(bus: Bus, bucket: str) -> list[Blob]:
    """Every blob that there is, the longest untouched first; not those whose description cannot be read."""
    found = []
    for message in await ordered_reader.collect(bus, stream_of(bucket), f"$O.{bucket}.M.>"):
        info = object_info.read(message)
        if info is not None and not info.deleted:
            found.append(Blob(info.name, info.size, message.time, info.nuid, message.seq))
    return found


async def remove(bus: Bus, bucket: str, blob: Blob) -> bool:
    """Delete a blob unless it was touched since `blobs` found it."""
    if not await streams.delete_message(bus, stream_of(bucket), blob.seq):
        return False
    await streams.purge(bus, stream_of(bucket), f"$O.{bucket}.C.{blob.upload}")
    return True


async def remove_unfinished(bus: Bus, bucket: str, before: float) -> int:
    """Delete what is left of uploads whose process died, if nothing came since `before`, in unix seconds by the
    server's clock; returns how many."""
    stream, prefix = stream_of(bucket), f"$O.{bucket}.C."
    uploads = await streams.messages_per_subject(bus, stream, f"{prefix}>")
    finished = {f"{prefix}{blob.upload}" for blob in await blobs(bus, bucket)}  # after: a late end counts
    removed = 0
    for subject in uploads.keys() - finished:
        newest = await streams.last_message(bus, stream, subject)
        if newest is not None and newest.time < before:
            await streams.purge(bus, stream, subject)
            removed += 1
    return removed


async def discard(bus: Bus, bucket: str, digest: str, *, owner: str) -> None:
    """Delete a blob that has an owner, as a role may that writes the bucket and must not purge streams: an empty
    message takes the place of each part, and expires at once. Absent is fine."""
    there = await _description(bus, bucket, _name(digest, owner))
    if there is not None and (info := object_info.read(there)) is not None:
        await _roll_up(bus, there.subject)
        await _roll_up(bus, f"$O.{bucket}.C.{info.nuid}")


async def _roll_up(bus: Bus, subject: str) -> None:
    await bus.publish_stored(subject, b"", headers=_REPLACE, ttl_s=_MARKER_S)


async def delete(bus: Bus, bucket: str, digest: str) -> None:
    """Absent is fine."""
    there = await _description(bus, bucket, digest)
    if there is not None:
        await streams.purge(bus, stream_of(bucket), there.subject)
        if (info := object_info.read(there)) is not None:
            await streams.purge(bus, stream_of(bucket), f"$O.{bucket}.C.{info.nuid}")


async def withdraw(bus: Bus, bucket: str, digest: str) -> None:
    """Delete a blob's description. `remove_unfinished` removes the chunks, for roles that may not purge a stream."""
    there = await _description(bus, bucket, digest)
    if there is not None:
        await streams.delete_message(bus, stream_of(bucket), there.seq)


async def _send_chunks(bus: Bus, subject: str, upload: str, chunks: AsyncIterator[bytes], ttl_s: float | None) -> int:
    """Returns how many there were."""
    in_flight: deque[asyncio.Task[Stored]] = deque()
    count = last = 0

    async def settle_one() -> None:
        nonlocal last
        place = (await in_flight.popleft()).seq
        if place < last:  # one was sent again, behind its successors
            raise BusUnavailable("Storing a blob was disturbed: put it again.")
        last = place

    try:
        async for chunk in chunks:
            if len(in_flight) == _WINDOW:
                await settle_one()
            # The id keeps a chunk single when the fate of its first sending is unknown.
            sending = bus.publish_stored(subject, chunk, msg_id=f"{upload}-{count}", ttl_s=ttl_s, timeout_s=_STALLED_S)
            in_flight.append(asyncio.create_task(sending, name=f"{upload}-{count}"))
            count += 1
        while in_flight:
            await settle_one()
    except BusUnavailable as error:
        raise type(error)(f"Storing a blob broke off: {error}") from error
    finally:  # what is on its way would arrive after a purge
        await asyncio.gather(*in_flight, return_exceptions=True)
    return count


async def _whole_chunks(parts: AsyncIterator[bytes], size: int, sha256: Sha256) -> AsyncGenerator[bytes, None]:
    """The same bytes in whole chunks, each added to `sha256`. Raises InvalidInput at the end, or as soon as there are
    too many."""
    left, held = size, bytearray()

    async def take(length: int) -> bytes:
        chunk = bytes(memoryview(held)[:length])
        del held[:length]
        await sha256.add(chunk)
        return chunk

    async for part in parts:
        left -= len(part)
        if left < 0:
            break
        held += part
        while len(held) >= _CHUNK:
            yield await take(_CHUNK)
    if left:
        raise InvalidInput(f"These are {'more' if left < 0 else 'fewer'} bytes than the {size:,} announced.")
    if held:
        yield await take(len(held))


def _same(found: str, digest: str | None) -> str:
    """`found`. Raises InvalidInput when `digest` was announced, and is another."""
    if digest not in (None, found):
        raise InvalidInput(f"These bytes do not have the digest {digest[:12]}: they were damaged on their way.")
    return found


async def parts_of(data: bytes | memoryview) -> AsyncGenerator[bytes, None]:
    """`data` as `put_stream` and `keep_stream` take it."""
    for at in range(0, len(data), _CHUNK):
        yield bytes(data[at : at + _CHUNK])


async def _parts_of_file(path: Path) -> AsyncGenerator[bytes, None]:
    # Opened here, as below, in microseconds: a thread would leave it open when who waits for it is cancelled.
    with path.open("rb") as file:
        while part := await asyncio.to_thread(file.read, _CHUNK):
            yield part


def _size_and_digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


async def _write(bus: Bus, bucket: str, digest: str, path: Path) -> None:
    async with contextlib.aclosing(_read_checked(bus, bucket, digest)) as chunks:
        with path.open("wb") as file:
            async for chunk in chunks:
                await asyncio.to_thread(file.write, chunk)
            await asyncio.to_thread(file.flush)


async def _read_checked(bus: Bus, bucket: str, digest: str, owner: str = "") -> AsyncGenerator[bytes, None]:
    there = await _description(bus, bucket, _name(digest, owner))
    if there is None:
        raise ArtifactUnavailable(f"{bucket} has no {digest[:12]}.")
    info = object_info.read(there)
    if info is None:
        raise ArtifactUnavailable(f"What {bucket} has for {digest[:12]} cannot be read: put it again.")
    if info.deleted:
        raise ArtifactUnavailable(f"{bucket} has no {digest[:12]}.")
    sha256, size = Sha256(), 0
    async with contextlib.aclosing(_read_chunks(bus, bucket, info)) as chunks:
        async for chunk in chunks:
            size += len(chunk)
            await sha256.add(chunk)
            yield chunk
    if size != info.size or await sha256.hexdigest() != digest:
        raise ArtifactUnavailable(f"{digest[:12]} in {bucket} is damaged: put it again.")


async def _read_chunks(bus: Bus, bucket: str, info: BlobInfo) -> AsyncGenerator[bytes, None]:
    arrived: asyncio.Queue[Message] = asyncio.Queue()
    inbox = bus.new_inbox()
    subscription = bus.subscribe(inbox, arrived.put_nowait)
    next_seq, missing = 1, info.chunks
    incomplete = ArtifactUnavailable(f"{info.name[:12]} in {bucket} lacks chunks: put it again.")
    try:
        while missing:
            batch = min(missing, _WINDOW)
            body = {"seq": next_seq, "next_by_subj": f"$O.{bucket}.C.{info.nuid}", "batch": batch}
            bus.publish(f"{jetstream.API}DIRECT.GET.{stream_of(bucket)}", msgspec.json.encode(body), reply=inbox)
            # The batch, then a notice: 204 at its end, 404 when nothing matches, 503 when nobody answers.
            while not (message := await _next(arrived, bucket)).status:
                yield message.payload
                missing -= 1
                next_seq = int((message.headers or {})["Nats-Sequence"]) + 1
                batch -= 1
            if message.status == 503:
                raise BusUnavailable(f"{bucket} cannot be read: nobody answers for it.")
            if batch:  # in a cluster the node that answered may be behind
                chunk = await streams.next_message(bus, stream_of(bucket), f"$O.{bucket}.C.{info.nuid}", next_seq)
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


# --- descriptions -----------------------------------------------------------------------------------------------------


async def _description(bus: Bus, bucket: str, name: str) -> StoredMessage | None:
    return await streams.last_message(bus, stream_of(bucket), object_info.subject(bucket, name))


async def _is_whole(bus: Bus, description: StoredMessage) -> bool:
    """Whether it names a blob all of whose chunks are there. Their bytes are looked at when they are read."""
    info = object_info.read(description)
    if info is None or info.deleted:
        return False
    subject = f"$O.{info.bucket}.C.{info.nuid}"
    stored = await streams.messages_per_subject(bus, stream_of(info.bucket), subject)
    return stored.get(subject, 0) == info.chunks


async def _describe(bus: Bus, info: BlobInfo, ttl_s: float | None) -> bool:
    """Store the description of an upload, unless there is one of the same bytes that is whole: then False. One that
    expires takes the place of any: the other may be about to."""
    subject, payload = object_info.subject(info.bucket, info.name), msgspec.json.encode(info)
    useless: StoredMessage | None = None
    while True:
        last, headers = (0, None) if useless is None else (useless.seq, _REPLACE)
        try:
            await bus.publish_stored(subject, payload, expected_last=last, ttl_s=ttl_s, headers=headers)
        except Conflict:
            useless = await _description(bus, info.bucket, info.name)
            if useless is not None and ttl_s is None and await _is_whole(bus, useless):
                return False
        else:
            return True


def _name(digest: str, owner: str) -> str:
    return f"{owner}.{digest}" if owner else digest
