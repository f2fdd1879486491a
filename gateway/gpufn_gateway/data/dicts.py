"""Dicts by name, in one key-value bucket: `<dict>.<key in base64url>`.

Each write of an entry is atomic, and the last one stays. `create` writes only if the key is absent. The bucket has a
limit of bytes. Deletions purge, because a deletion marker would not fit into a full bucket.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator

import msgspec

from gpufn_core.errors import CapacityError, Conflict, DataNotFound, InvalidInput, PayloadTooLarge, QueueFull
from gpufn_core.protocol import codec
from gpufn_core.protocol.data import KEY_CHARS, MAX_DICTS_BYTES, MAX_ENTRIES, check_seconds
from gpufn_gateway.data.queues import check_size
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.key_value import KeyValue


class _Entry(msgspec.Struct, frozen=True):
    """The header of a stored value."""

    content_type: str


_unpack: codec.Unpacker[_Entry] = codec.Unpacker(_Entry)


class Dicts:
    def __init__(self, bucket: KeyValue) -> None:
        self._bucket = bucket

    async def all(self) -> dict[str, int]:
        """Return the number of entries, by dict. A dict without entries does not exist."""
        counts: dict[str, int] = {}
        for key in await self._bucket.keys():
            name = key.rpartition(".")[0]
            counts[name] = counts.get(name, 0) + 1
        return dict(sorted(counts.items()))

    async def get(self, name: str, key: str) -> tuple[str, bytes] | None:
        """Return content type and value; None if the key is absent."""
        entry = await self._bucket.get(_stored(name, key))
        if entry is None:
            return None
        header, value = _unpack(entry.value)
        return header.content_type, value

    async def set(
        self, name: str, key: str, content_type: str, value: bytes, *, ttl_s: float | None, only_new: bool
    ) -> bool:
        """Store a value. Return False if the key exists and `only_new` is set. Raises PayloadTooLarge, InvalidInput,
        CapacityError."""
        check_size(value, f"the value of {key[:60]!r} in {name}")
        check_seconds("ttl", ttl_s)
        with _translate_full_bucket(name):
            return await self._set(name, _stored(name, key), codec.pack(_Entry(content_type), value), ttl_s, only_new)

    async def _set(self, name: str, stored: str, record: bytes, ttl_s: float | None, only_new: bool) -> bool:
        if not only_new and await self._bucket.get(stored) is not None:
            await self._bucket.update(stored, record, None, ttl_s=ttl_s)
            return True
        if await self._count(name) >= MAX_ENTRIES:
            raise PayloadTooLarge(f"{name} has {MAX_ENTRIES:,} entries, as many as a dict may have")
        try:
            await self._bucket.create(stored, record, ttl_s=ttl_s)
        except Conflict:
            if only_new:
                return False
            await self._bucket.update(stored, record, None, ttl_s=ttl_s)
        return True

    async def _count(self, name: str) -> int:
        """Count the entries."""
        return await streams.count(self._bucket.bus, self._bucket.stream, f"{self._bucket.subject(name)}.*")

    async def remove(self, name: str, key: str) -> bool:
        """Delete an entry. Return False if it is absent."""
        stored = _stored(name, key)
        if await self._bucket.get(stored) is None:
            return False
        await self._bucket.purge(stored)
        return True

    async def keys(self, name: str) -> list[str]:
        """List the keys, the oldest change first."""
        return [_key(key) for key in await self._bucket.keys(f"{name}.")]

    async def clear(self, name: str) -> None:
        """Delete all entries. Raises DataNotFound if there are none."""
        if not await self._bucket.purge(f"{name}.*"):
            raise no_such_dict(name)


def no_such_dict(name: str) -> DataNotFound:
    return DataNotFound(f"There is no dict {name}: see `gpufn dict ls`.")


@contextlib.contextmanager
def _translate_full_bucket(name: str) -> Iterator[None]:
    try:
        yield
    except QueueFull as error:
        raise CapacityError(
            f"{name} cannot store the value: all dicts together have "
            f"{MAX_DICTS_BYTES >> 30} GiB, as many as they may have. Delete entries."
        ) from error


def _stored(name: str, key: str) -> str:
    """Return the key of the bucket. Raises InvalidInput."""
    if not 0 < len(key) <= KEY_CHARS:
        raise InvalidInput(f"a key is text of 1 to {KEY_CHARS} characters", field="key")
    data = key.encode(errors="surrogatepass")
    return f"{name}.{base64.urlsafe_b64encode(data).decode().rstrip('=')}"


def _key(stored: str) -> str:
    text = stored.rpartition(".")[2]
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode(errors="surrogatepass")
