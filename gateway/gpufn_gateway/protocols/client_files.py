"""Files and batches of clients of other platforms. Each belongs to the API key that sent it.

The description is in a bucket whose records expire. The bytes are beside the arguments of calls, and expire as well.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import msgspec

from gpufn_core.errors import Conflict, InvalidInput
from gpufn_core.ids import is_client_id, new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.records import CLIENT_FILES_RETENTION_S, BodyReference, ClientBatch, ClientFile
from gpufn_gateway.http import negotiation
from gpufn_gateway.problems import RouteError
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue import large_bodies

MAX_OWNED_BYTES: Final = 2 << 30  # the files share their store with the arguments of all waiting calls
MAX_OWNED_RECORDS: Final = 5000  # files and batches; each upload reads their records
_MAX_NAME_CHARS: Final = 512
_decode: Final = msgspec.msgpack.Decoder(ClientFile).decode
_decode_batch: Final = msgspec.msgpack.Decoder(ClientBatch).decode
_BATCH: Final = "batch"  # no key has this id


class ClientFiles:
    def __init__(self, bus: Bus, bucket: KeyValue, clock: Clock) -> None:
        self._bus = bus
        self._bucket = bucket
        self._clock = clock

    async def create(
        self, owner: str, name: str, content_type: str, data: bytes | memoryview, *, purpose: str = ""
    ) -> ClientFile:
        """Store a file. Raises Conflict if the owner has too many, InvalidInput, CapacityError, BusUnavailable."""
        if len(name) > _MAX_NAME_CHARS:
            raise InvalidInput(f"the name of a file has at most {_MAX_NAME_CHARS} characters", field="file")
        await self.check_room(owner, len(data))
        reference = await self._store(data)
        now = self._clock.time()
        file = ClientFile(
            id=new_ulid(),
            owner=owner,
            name=name,
            content_type=negotiation.clean(content_type),
            size=len(data),
            purpose=purpose,
            created_at=now,
            expires_at=now + CLIENT_FILES_RETENTION_S,
            reference=reference,
        )
        await self._bucket.create(f"{owner}.{file.id}", encode(file))
        return file

    async def check_room(self, owner: str, size: int = 0) -> None:
        """Raise Conflict unless the owner may store one more file or batch with `size` bytes."""
        files, batches = await self.all(owner), await self.batches(owner)
        stored = sum(each.size for each in files) + sum(each.calls.size for each in batches)
        count = len(files) + len(batches)
        if stored + size > MAX_OWNED_BYTES or count >= MAX_OWNED_RECORDS:
            raise Conflict(
                f"This API key keeps {count:,} files and batches with {stored:,} bytes, and may keep "
                f"{MAX_OWNED_RECORDS:,} with {MAX_OWNED_BYTES:,}: delete some files. All expire after "
                f"{CLIENT_FILES_RETENTION_S / 86400:g} days."
            )

    async def _store(self, data: bytes | memoryview) -> BodyReference:
        owner = large_bodies.expiring_owner()
        return await large_bodies.store(
            self._bus, subjects.ARGUMENT_FILES, data, owner=owner, ttl_s=CLIENT_FILES_RETENTION_S
        )

    async def find(self, owner: str, id_: str) -> ClientFile:
        """Return a file of this owner. Raises RouteError 404, also for a file of another owner."""
        entry = await self._bucket.get(f"{owner}.{id_}") if is_client_id(id_) else None
        if entry is None:
            raise RouteError(404, f"There is no file {id_[:40]!r} of this API key; it may have expired.")
        return _decode(entry.value)

    async def all(self, owner: str) -> list[ClientFile]:
        """Return the files of this owner, the newest first."""
        return [_decode(entry.value) for entry in reversed(await self._bucket.entries(f"{owner}."))]

    async def read(self, file: ClientFile) -> bytes:
        """Return the bytes. Raises ArtifactUnavailable, BusUnavailable."""
        return await self.read_bytes(file.reference)

    async def read_bytes(self, reference: BodyReference) -> bytes:
        data = bytearray()
        parts = large_bodies.read(self._bus, subjects.ARGUMENT_FILES, reference)
        async with contextlib.aclosing(parts):
            async for part in parts:
                data += part
        return bytes(data)

    async def remove(self, file: ClientFile) -> None:
        await self._bucket.delete(f"{file.owner}.{file.id}")
        await large_bodies.remove(self._bus, subjects.ARGUMENT_FILES, file.reference)

    # --- batches -----------------------------------------------------------------------------------------------------

    async def create_batch(self, owner: str, calls: bytes, **fields: Any) -> ClientBatch:
        """Store a batch. Raises Conflict if the owner has too many, CapacityError, BusUnavailable."""
        await self.check_room(owner, len(calls))
        now = self._clock.time()
        batch = ClientBatch(
            id=new_ulid(),
            owner=owner,
            calls=await self._store(calls),
            created_at=now,
            expires_at=now + CLIENT_FILES_RETENTION_S,
            **fields,
        )
        await self._bucket.create(_batch_key(owner, batch.id), encode(batch))
        return batch

    async def find_batch(self, owner: str, id_: str) -> ClientBatch:
        """Return a batch of this owner. Raises RouteError 404, also for a batch of another owner."""
        entry = await self._bucket.get(_batch_key(owner, id_)) if is_client_id(id_) else None
        if entry is None:
            raise RouteError(404, f"There is no batch {id_[:40]!r} of this API key; it may have expired.")
        return _decode_batch(entry.value)

    async def batches(self, owner: str) -> list[ClientBatch]:
        """Return the batches of this owner, the newest change first."""
        entries = await self._bucket.entries(_batch_key(owner, ""))
        return [_decode_batch(entry.value) for entry in reversed(entries)]

    async def change_batch(self, batch: ClientBatch, **changes: Any) -> ClientBatch:
        """Change the stored batch, and return it. Raises Conflict if it has ended, or is changed at the same time."""
        key = _batch_key(batch.owner, batch.id)
        entry = await self._bucket.get(key)
        latest = None if entry is None else _decode_batch(entry.value)
        if entry is None or latest is None or latest.is_ended:
            raise Conflict(f"batch {batch.id} has ended meanwhile")
        changed = msgspec.structs.replace(latest, **changes)
        await self._bucket.update(key, encode(changed), entry.revision)
        return changed


def _batch_key(owner: str, id_: str) -> str:
    return f"{_BATCH}.{owner}.{id_}"
