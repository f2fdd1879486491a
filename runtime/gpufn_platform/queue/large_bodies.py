"""Bodies that are too large for a message: blobs in the bus's object store, and references to them.

store     Before the message with the reference, so that every reader of the message finds the body. Arguments of a call
          with a waiting client expire soon after the call's deadline.
read      Part by part. Digest and size are verified at the end.
remove    When the call has ended. The runner or the caller removes the arguments, the caller removes a result that it
          has read. A kept result expires with its record. Remaining bodies expire, or the leader collects them
          (`gpufn_gateway.garbage_collection.argument_files`).

Arguments are in ARGUMENT_FILES, results in RESULT_FILES. Each invocation owns its body: a blob shared by two calls
would be removed at the first end.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

from gpufn_core.errors import CapacityError, GpufnError, QueueFull
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.data import MAX_VALUES_BYTES
from gpufn_core.protocol.records import BodyReference
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store

MAX_ARGUMENT_BYTES: Final = 16 << 30  # for all waiting calls; the same limit as the queue of submitted calls
EXPIRES_LATER_S: Final = 60.0  # after the call's deadline
RESULT_EXPIRES_S: Final = 600.0  # the caller reads it at once
_EXPIRING_PREFIX = "waited-"  # no invocation id starts with this
_FULL_RETRY_S: Final = 5.0


async def ensure_buckets(bus: Bus) -> None:
    await object_store.ensure_bucket(bus, subjects.ARGUMENT_FILES, expires=True, max_bytes=MAX_ARGUMENT_BYTES)
    await object_store.ensure_bucket(bus, subjects.RESULT_FILES, expires=True)
    await object_store.ensure_bucket(bus, subjects.VALUES, expires=True, max_bytes=MAX_VALUES_BYTES)


def expiring_owner(tag: str = "") -> str:
    """Return a new owner for a body of a call with a waiting client: such a body expires by itself."""
    return f"{_EXPIRING_PREFIX}{new_ulid()}{'-' if tag else ''}{tag}"


def expires_by_itself(owner: str) -> bool:
    return owner.startswith(_EXPIRING_PREFIX)


async def store_file(bus: Bus, bucket: str, path: Path, *, owner: str, ttl_s: float | None = None) -> BodyReference:
    """Store a file. Raises CapacityError when the store is full, BusUnavailable; OSError, InvalidInput like
    `object_store.keep_file`."""
    with _translate_full_store():
        digest, size = await object_store.keep_file(bus, bucket, path, owner=owner, ttl_s=ttl_s)
    return BodyReference(owner, digest, size)


async def store(
    bus: Bus, bucket: str, data: bytes | memoryview, *, owner: str, ttl_s: float | None = None
) -> BodyReference:
    """Store bytes. Raises CapacityError when the store is full, BusUnavailable."""
    return await _store_parts(bus, bucket, object_store.parts_of(data), BodyReference(owner, "", len(data)), ttl_s)


async def copy_arguments(bus: Bus, reference: BodyReference, owner: str) -> BodyReference:
    """Copy arguments for another invocation. Raises ArtifactUnavailable, and like `store`."""
    async with contextlib.aclosing(read(bus, subjects.ARGUMENT_FILES, reference)) as parts:
        return await _store_parts(bus, subjects.ARGUMENT_FILES, parts, BodyReference(owner, "", reference.size), None)


async def _store_parts(
    bus: Bus, bucket: str, parts: AsyncIterator[bytes], reference: BodyReference, ttl_s: float | None
) -> BodyReference:
    """Store `parts`; returns `reference` with their digest."""
    owner, size = reference.owner, reference.size
    with _translate_full_store():
        digest = await object_store.keep_stream(bus, bucket, size, parts, owner=owner, ttl_s=ttl_s)
    return BodyReference(owner, digest, size)


def read(bus: Bus, bucket: str, reference: BodyReference) -> AsyncGenerator[bytes, None]:
    """Iterate over a body. Raises ArtifactUnavailable, before the first part or instead of the end; BusUnavailable."""
    return object_store.read(bus, bucket, reference.digest, owner=reference.owner)


async def read_into(bus: Bus, bucket: str, reference: BodyReference, write: Callable[[bytes], object]) -> None:
    """Read a body into `write`. Raises like `read`, and whatever `write` raises."""
    async with contextlib.aclosing(read(bus, bucket, reference)) as parts:
        async for part in parts:
            write(part)


async def remove(bus: Bus, bucket: str, reference: BodyReference) -> None:
    """Remove a body. A missing body is not an error. If removing fails now, the body expires or is collected."""
    with contextlib.suppress(GpufnError):
        await object_store.discard(bus, bucket, reference.digest, owner=reference.owner)


@contextlib.contextmanager
def _translate_full_store() -> Iterator[None]:
    try:
        yield
    except QueueFull as error:
        raise CapacityError(
            "The store for large bodies is full: try again when some of the waiting calls have ended.",
            retry_after_s=_FULL_RETRY_S,
        ) from error
