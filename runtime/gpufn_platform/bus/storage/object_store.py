"""Blobs named by the sha256 of their bytes: bundles, models, engines.

The layout is the layout of NATS object stores, so other clients can read it: chunks of 1 MiB on
`$O.<bucket>.C.<upload>`, one description on `$O.<bucket>.M.<name>`. The transfer is our own: nats-py's keeps everything
in memory twice, reads at 5-50 MB/s and hangs when a chunk is missing.

put   1. send the chunks, with a window of them in flight   2. verify size and digest   3. create the description. If it
      exists already, or an earlier step fails, the chunks are removed. An unreadable description, or one with missing
      chunks, is replaced: putting a damaged blob again repairs it
get   1. read the description   2. request batches of chunks by sequence   3. verify size and digest
keep  before a record refers to a blob, the blob is touched: its description is stored again. Garbage collection of
      unreferenced blobs skips young ones and removes a description by sequence, so a touched blob survives
own   a blob with an owner belongs to one owner and expires: the owner is part of its name. Keeping it again stores
      another copy, with its own expiry

Files and streams of any size need the memory of two windows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from gpufn_core.errors import ArtifactUnavailable, Conflict, GpufnError, InvalidInput
from gpufn_core.ids import digest_of
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_chunks, object_info, ordered_reader, streams
from gpufn_platform.bus.storage.hashing import Sha256
from gpufn_platform.bus.storage.object_chunks import CHUNK
from gpufn_platform.bus.storage.object_info import BlobInfo
from gpufn_platform.bus.storage.ordered_reader import StoredMessage

_REPLACE: Final = {"Nats-Rollup": "sub"}
_MARKER_S: Final = 1.0  # the server's minimum


class Blob(msgspec.Struct, frozen=True):
    """A blob as listed by `blobs`. `put_at`: last put or touch, in unix seconds by the server's clock."""

    digest: str
    size: int
    put_at: float
    upload: str
    seq: int


def stream_of(bucket: str) -> str:
    return f"OBJ_{bucket}"


async def ensure_bucket(bus: Bus, bucket: str, *, expires: bool = False, max_bytes: int | None = None) -> None:
    """Create the bucket. `expires`: for blobs with an owner. Writes fail once the bucket has `max_bytes`."""
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
    """Store `data` unless the blob exists; returns its digest. The bucket must exist (`ensure_bucket`). For `purges`
    see `put_file`."""
    digest = await asyncio.to_thread(digest_of, data)
    if not await touch(bus, bucket, digest):
        await _put(bus, bucket, digest, len(data), parts_of(data), purges=purges)
    return digest


async def put_file(bus: Bus, bucket: str, path: Path, *, purges: bool = True) -> tuple[str, bool]:
    """Store a file unless its blob exists. Returns the digest, and whether this call stored it.

    `purges` False: for a role that may not purge streams; `remove_unfinished` removes the chunks of a failed upload.
    Raises OSError when the file cannot be read.
    """
    size, digest = await asyncio.to_thread(_size_and_digest, path)
    is_new = not await touch(bus, bucket, digest)
    if is_new:
        async with contextlib.aclosing(_parts_of_file(path)) as parts:
            await _put(bus, bucket, digest, size, parts, purges=purges)
    return digest, is_new


async def put_stream(
    bus: Bus, bucket: str, digest: str, size: int, parts: AsyncIterator[bytes], *, purges: bool = True
) -> None:
    """Store the concatenation of `parts`, which may have any lengths. For `purges` see `put_file`.

    Raises InvalidInput unless that is `size` bytes with this `digest`. After an exception there is no blob that looks
    complete but is not.
    """
    await _put(bus, bucket, digest, size, parts, purges=purges)


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
    """Implement `put_stream` and others. `digest` None: compute it. Returns the digest."""
    upload = secrets.token_hex(11)
    subject = f"$O.{bucket}.C.{upload}"
    sha256 = Sha256()
    try:
        async with contextlib.aclosing(object_chunks.regroup(parts, size, sha256)) as whole:
            chunks = await object_chunks.send(bus, subject, upload, whole, ttl_s)
        digest = _verify_digest(await sha256.hexdigest(), digest)
    except BaseException:
        with contextlib.suppress(GpufnError):
            if purges:
                await streams.purge(bus, stream_of(bucket), subject)
            elif owner:
                await _roll_up(bus, subject)
        raise
    # After a failure from here on the chunks stay: the description that names them may have been stored. If it was not,
    # `remove_unfinished` finds them.
    info = BlobInfo(_name(digest, owner), bucket, upload, size, chunks, object_info.wire_digest(digest))
    if not await _describe(bus, info, ttl_s):
        if purges:
            await streams.purge(bus, stream_of(bucket), subject)
        elif owner:
            await _roll_up(bus, subject)
    return digest


async def check(digest: str, size: int, parts: AsyncIterator[bytes]) -> None:
    """Read `parts` to the end without storing them. Raises InvalidInput like `put_stream`."""
    sha256 = Sha256()
    async with contextlib.aclosing(object_chunks.regroup(parts, size, sha256)) as whole:
        async for _ in whole:
            pass
    _verify_digest(await sha256.hexdigest(), digest)


async def get(bus: Bus, bucket: str, digest: str) -> bytes:
    """Return a blob's bytes. Raises ArtifactUnavailable if it is absent, incomplete or damaged."""
    async with contextlib.aclosing(read(bus, bucket, digest)) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def get_file(bus: Bus, bucket: str, digest: str, path: Path) -> None:
    """Write a blob to `path`, which is created or overwritten, and removed if anything is raised.

    The file is incomplete until this returns: use a temporary name and rename it. Raises ArtifactUnavailable if the
    blob is absent, incomplete or damaged, or cannot be written.
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
    """Store a file for one owner for `ttl_s`, or until it is deleted; returns its digest and size.

    Reads the file once and does not look for an existing blob. Raises OSError if the file cannot be read, InvalidInput
    if its size changes meanwhile.
    """
    size = (await asyncio.to_thread(path.stat)).st_size
    async with contextlib.aclosing(_parts_of_file(path)) as parts:
        digest = await _put(bus, bucket, None, size, parts, owner=owner, ttl_s=ttl_s, purges=False)
    return digest, size


async def keep_stream(
    bus: Bus, bucket: str, size: int, parts: AsyncIterator[bytes], *, owner: str, ttl_s: float | None
) -> str:
    """Like `keep_file`, for the concatenation of `parts`; returns the digest."""
    return await _put(bus, bucket, None, size, parts, owner=owner, ttl_s=ttl_s, purges=False)


async def verify(bus: Bus, bucket: str, digest: str) -> bool:
    """Return whether a blob exists and is intact; reads all of its bytes. A damaged blob's description is removed, or
    `put` would assume that the blob exists."""
    description = await _description(bus, bucket, digest)
    try:
        async with contextlib.aclosing(read(bus, bucket, digest)) as chunks:
            async for _ in chunks:
                pass
    except ArtifactUnavailable:
        if description is not None:  # a blob that was put meanwhile stays
            await streams.delete_message(bus, stream_of(bucket), description.seq)
        return False
    return True


async def touch(bus: Bus, bucket: str, digest: str) -> bool:
    """Reset a blob's age as if it was put just now. Returns whether the blob exists with all of its chunks."""
    while (description := await _description(bus, bucket, digest)) is not None and await _is_whole(bus, description):
        with contextlib.suppress(Conflict):
            await bus.publish_stored(
                description.subject, description.payload, expected_last=description.seq, headers=_REPLACE
            )
            return True
    return False


async def size_of(bus: Bus, bucket: str, digest: str, *, owner: str = "") -> int | None:
    """Return a blob's size; None if it is absent."""
    description = await _description(bus, bucket, _name(digest, owner))
    info = None if description is None else object_info.read(description)
    return None if info is None or info.deleted else info.size


async def blobs(bus: Bus, bucket: str) -> list[Blob]:
    """List every blob, the longest untouched first. Skips unreadable descriptions."""
    results = []
    for message in await ordered_reader.collect(bus, stream_of(bucket), f"$O.{bucket}.M.>"):
        info = object_info.read(message)
        if info is not None and not info.deleted:
            results.append(Blob(info.name, info.size, message.time, info.nuid, message.seq))
    return results


async def remove(bus: Bus, bucket: str, blob: Blob) -> bool:
    """Delete a blob unless it was touched since `blobs` found it."""
    if not await streams.delete_message(bus, stream_of(bucket), blob.seq):
        return False
    await streams.purge(bus, stream_of(bucket), f"$O.{bucket}.C.{blob.upload}")
    return True


async def remove_unfinished(bus: Bus, bucket: str, before: float) -> int:
    """Delete the chunks of uploads whose process died, if the last chunk arrived before `before` (unix seconds by the
    server's clock). Returns the number of uploads."""
    stream, prefix = stream_of(bucket), f"$O.{bucket}.C."
    uploads = await streams.messages_per_subject(bus, stream, f"{prefix}>")
    finished = {f"{prefix}{blob.upload}" for blob in await blobs(bus, bucket)}  # listed second, to see late finishes
    removed = 0
    for subject in uploads.keys() - finished:
        newest = await streams.last_message(bus, stream, subject)
        if newest is not None and newest.time < before:
            await streams.purge(bus, stream, subject)
            removed += 1
    return removed


async def discard(bus: Bus, bucket: str, digest: str, *, owner: str) -> None:
    """Delete a blob that has an owner, for roles that may write to the bucket but not purge streams: an empty message
    replaces each part and expires at once. An absent blob is no error."""
    description = await _description(bus, bucket, _name(digest, owner))
    if description is not None and (info := object_info.read(description)) is not None:
        await _roll_up(bus, description.subject)
        await _roll_up(bus, f"$O.{bucket}.C.{info.nuid}")


async def _roll_up(bus: Bus, subject: str) -> None:
    await bus.publish_stored(subject, b"", headers=_REPLACE, ttl_s=_MARKER_S)


async def withdraw(bus: Bus, bucket: str, digest: str) -> None:
    """Delete a blob's description, for roles that may not purge streams. `remove_unfinished` removes the chunks."""
    description = await _description(bus, bucket, digest)
    if description is not None:
        await streams.delete_message(bus, stream_of(bucket), description.seq)


def _verify_digest(actual: str, digest: str | None) -> str:
    """Return `actual`. Raises InvalidInput if it differs from the announced `digest`."""
    if digest not in (None, actual):
        raise InvalidInput(f"These bytes do not have the digest {digest[:12]}: they were damaged in transit.")
    return actual


async def parts_of(data: bytes | memoryview) -> AsyncGenerator[bytes, None]:
    """Split `data` into chunks for `put_stream` and `keep_stream`."""
    for at in range(0, len(data), CHUNK):
        yield bytes(data[at : at + CHUNK])


async def _parts_of_file(path: Path) -> AsyncGenerator[bytes, None]:
    # Opening takes microseconds, so it is done on the event loop: a thread would leak the file when its caller is
    # cancelled. The same applies below.
    with path.open("rb") as file:
        while part := await asyncio.to_thread(file.read, CHUNK):
            yield part


def _size_and_digest(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


async def _write(bus: Bus, bucket: str, digest: str, path: Path) -> None:
    async with contextlib.aclosing(read(bus, bucket, digest)) as chunks:
        with path.open("wb") as file:
            async for chunk in chunks:
                await asyncio.to_thread(file.write, chunk)
            await asyncio.to_thread(file.flush)


async def read(bus: Bus, bucket: str, digest: str, *, owner: str = "") -> AsyncGenerator[bytes, None]:
    """Iterate over a blob's bytes. Raises ArtifactUnavailable, before the first chunk or instead of the end."""
    description = await _description(bus, bucket, _name(digest, owner))
    info = None if description is None else object_info.read(description)
    if description is not None and info is None:
        raise ArtifactUnavailable(f"The description of {digest[:12]} in {bucket} cannot be read: put it again.")
    if info is None or info.deleted:
        raise ArtifactUnavailable(f"{bucket} has no {digest[:12]}.")
    sha256, size = Sha256(), 0
    async with contextlib.aclosing(object_chunks.read(bus, bucket, stream_of(bucket), info)) as chunks:
        async for chunk in chunks:
            size += len(chunk)
            await sha256.add(chunk)
            yield chunk
    if size != info.size or await sha256.hexdigest() != digest:
        raise ArtifactUnavailable(f"{digest[:12]} in {bucket} is damaged: put it again.")


# --- descriptions -----------------------------------------------------------------------------------------------------


async def _description(bus: Bus, bucket: str, name: str) -> StoredMessage | None:
    return await streams.last_message(bus, stream_of(bucket), object_info.subject(bucket, name))


async def _is_whole(bus: Bus, description: StoredMessage) -> bool:
    """Return whether all chunks of a blob exist. Their bytes are verified when they are read."""
    info = object_info.read(description)
    if info is None or info.deleted:
        return False
    subject = f"$O.{info.bucket}.C.{info.nuid}"
    stored = await streams.messages_per_subject(bus, stream_of(info.bucket), subject)
    return stored.get(subject, 0) == info.chunks


async def _describe(bus: Bus, info: BlobInfo, ttl_s: float | None) -> bool:
    """Store the description of an upload. Returns False if a complete blob with the same bytes exists. A description
    that expires replaces any existing one, which may be about to expire."""
    subject, payload = object_info.subject(info.bucket, info.name), msgspec.json.encode(info)
    replaced: StoredMessage | None = None
    while True:
        last_seq, headers = (0, None) if replaced is None else (replaced.seq, _REPLACE)
        try:
            await bus.publish_stored(subject, payload, expected_last=last_seq, ttl_s=ttl_s, headers=headers)
        except Conflict:
            replaced = await _description(bus, info.bucket, info.name)
            if replaced is not None and ttl_s is None and await _is_whole(bus, replaced):
                return False
        else:
            return True


def _name(digest: str, owner: str) -> str:
    return f"{owner}.{digest}" if owner else digest
