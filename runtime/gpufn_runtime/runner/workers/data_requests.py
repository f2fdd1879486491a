"""Requests of functions for volumes, dicts, queues and stored values (`gpufn_core.protocol.data`).

A gateway executes them. The files of volumes are stored here, as streams: each part that a worker sends is passed to
the upload of its file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, NamedTuple

from gpufn_core.domain.team import Team
from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import (
    BusUnavailable,
    Conflict,
    Forbidden,
    InvalidInput,
    PayloadTooLarge,
    ProtocolMismatch,
    error_from,
)
from gpufn_core.ids import is_digest
from gpufn_core.protocol import codec, subjects
from gpufn_core.protocol.data import (
    FILE_BYTES,
    PART_BYTES,
    STORED,
    UNCOMMITTED_BYTES,
    UNCOMMITTED_FILES,
    AdmitValue,
    CommitVolume,
    DataReply,
    DataRequest,
    GetValue,
    Operation,
    PutValue,
    PutVolumePart,
    check_seconds,
)
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.naming.names import home_of
from gpufn_core.spec.volume_spec import check_name, full_name_at
from gpufn_platform.bus.connection import Bus
from gpufn_platform.volume_store.store import VolumeStore
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies
from gpufn_runtime.runner.workers.stored_values import StoredValues

_REPLY_S: Final = 35.0  # longer than a gateway waits for an item
_STALLED_S: Final = 60.0  # an upload without a further part ends
_MAX_UPLOADS: Final = 8  # per worker
_REMOVED_S: Final = 3600.0  # files that no version names are removed after this time

unpack: codec.Unpacker[Any] = codec.Unpacker(Operation)
_unpack_reply: codec.Unpacker[DataReply] = codec.Unpacker(DataReply)


class Reply(NamedTuple):
    """The reply to a worker. `shared_body` is the name of a large value in the worker's folder."""

    content_type: str = ""
    value: bytes = b""
    shared_body: str = ""


class DataRequests:
    """`volume_files` stores the files of volumes. `team_of` returns the team of a function."""

    def __init__(
        self,
        bus: Bus,
        shared_bodies: NodeSharedBodies,
        volume_files: VolumeStore,
        team_of: Callable[[str], Team | None] = lambda _: None,
    ) -> None:
        self._bus = bus
        self._volume_files = volume_files
        self._team_of = team_of
        self.values = StoredValues(bus, shared_bodies)
        self._uploads: dict[tuple[str, str], _Upload] = {}  # by worker and digest
        self._uncommitted: dict[str, list[_Upload]] = {}  # by worker, with failed ones: their parts are stored too
        self.uncommitted_bytes = UNCOMMITTED_BYTES

    async def execute(self, worker: str, function: str, spec: FunctionSpec, request: bytes) -> Reply:
        """Execute a worker's request. Raises GpufnError."""
        try:
            operation, value = unpack(request)
        except (ProtocolMismatch, *DECODE_ERRORS) as error:
            raise InvalidInput(f"the request for data cannot be read: {error}") from error
        if isinstance(operation, PutValue):
            check_seconds("ttl", operation.ttl_s)
            return await self._put_value(function, value, operation.ttl_s)
        if isinstance(operation, GetValue):
            return Reply(shared_body=await self.values.get(operation.name, worker))
        check_name(operation.name)
        check_allowed(operation, spec)
        if isinstance(operation, PutVolumePart):
            return Reply("", await self._add_part(worker, operation, value))
        reply, body = await self._ask(DataRequest(function, operation), value)
        if isinstance(operation, CommitVolume):
            self._note_commit(worker, {file.digest for file in operation.change.put})
        return Reply(reply.content_type, body)

    async def _put_value(self, function: str, value: bytes, ttl_s: float) -> Reply:
        team = self._team_of(function)
        if team is not None and team.limits.stored_bytes is not None:
            await self._ask(DataRequest(function, AdmitValue("", len(value))))
        return Reply("", codec.encode(await self.values.put(value, ttl_s, "" if team is None else team.name)))

    async def _ask(self, request: DataRequest, value: bytes = b"") -> tuple[DataReply, bytes]:
        """Let a gateway execute a request. Raises GpufnError."""
        response = await self._bus.request(subjects.DATA_REQUESTS, codec.pack(request, value), timeout_s=_REPLY_S)
        reply, body = _unpack_reply(response.payload)
        if reply.error is not None:
            raise error_from(reply.error)
        return reply, body

    def forget(self, worker: str) -> None:
        """End the uploads of a worker that has ended."""
        for key in [key for key in self._uploads if key[0] == worker]:
            self._uploads.pop(key).cancel()
        self._uncommitted.pop(worker, None)

    async def _add_part(self, worker: str, part: PutVolumePart, data: bytes) -> bytes:
        if not is_digest(part.digest) or len(data) > PART_BYTES or part.size < part.offset + len(data):
            raise InvalidInput("a part of a volume's file is not as announced")
        if part.size > FILE_BYTES:
            raise PayloadTooLarge(f"a file has {part.size:,} bytes, more than the {FILE_BYTES:,} allowed: split it")
        key = worker, part.digest
        if part.offset == 0:
            if (other := self._uploads.pop(key, None)) is not None:
                other.cancel()
            if await self._volume_files.touch(part.digest) is not None:
                return STORED
            if sum(owner == worker for owner, _ in self._uploads) >= _MAX_UPLOADS:
                raise PayloadTooLarge(f"a worker stores at most {_MAX_UPLOADS} files at a time")
            self._check_uncommitted(worker, part.size)
            self._uploads[key] = _Upload(self._volume_files, part.digest, part.size)
            self._uncommitted.setdefault(worker, []).append(self._uploads[key])
        if (upload := self._uploads.get(key)) is None:
            raise Conflict("The upload of this file was interrupted: commit again.")
        is_last = part.offset + len(data) == part.size
        try:
            await upload.add(part.offset, data, is_last=is_last)
        except BaseException:
            self._uploads.pop(key, None)
            upload.cancel()
            raise
        if is_last:
            self._uploads.pop(key, None)
        return STORED if is_last else b""

    def _check_uncommitted(self, worker: str, size: int) -> None:
        """Raise PayloadTooLarge if the worker has stored too much without a commit."""
        since = asyncio.get_running_loop().time() - _REMOVED_S
        kept = [upload for upload in self._uncommitted.pop(worker, ()) if upload.started_at > since]
        if kept:
            self._uncommitted[worker] = kept
        stored = sum(upload.stored_bytes for upload in kept)
        if len(kept) >= UNCOMMITTED_FILES or stored + size > self.uncommitted_bytes:
            raise PayloadTooLarge(
                f"the worker has stored {len(kept):,} files with {stored:,} bytes and not committed them: it may have "
                f"{UNCOMMITTED_FILES:,} with {self.uncommitted_bytes:,} bytes, so commit fewer files at a time"
            )

    def _note_commit(self, worker: str, digests: set[str]) -> None:
        kept = [upload for upload in self._uncommitted.pop(worker, ()) if upload.digest not in digests]
        if kept:
            self._uncommitted[worker] = kept


class _Upload:
    """A file that is being stored."""

    def __init__(self, store: VolumeStore, digest: str, size: int) -> None:
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        self._next = 0
        self._size = size
        self.digest = digest
        self.started_at = asyncio.get_running_loop().time()
        stored = store.put_stream(digest, size, self._read())
        self._task = asyncio.create_task(stored, name=f"volume file {digest[:12]}")

    @property
    def stored_bytes(self) -> int:
        """The bytes that were stored, or will be if no part fails."""
        return self._next if self._task.done() else self._size

    async def add(self, offset: int, data: bytes, *, is_last: bool) -> None:
        """Pass on a part; with the last one, wait until the file is stored. Raises the errors of the upload."""
        if offset != self._next:
            raise InvalidInput("the parts of a volume's file are not in order")
        self._next += len(data)
        await self._put(data)
        if is_last:
            await self._put(None)
            await self._task

    def cancel(self) -> None:
        self._task.cancel()

    async def _put(self, part: bytes | None) -> None:
        """Queue a part, unless the upload ends first."""
        putting = asyncio.ensure_future(self._parts.put(part))
        await asyncio.wait((putting, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not putting.done():
            putting.cancel()
            await self._task
            raise InvalidInput("the file is stored already")

    async def _read(self) -> AsyncIterator[bytes]:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STALLED_S):
                    part = await self._parts.get()
                    if part is None:
                        return
                    yield part
                    continue
            raise BusUnavailable("No further part of the file came.")


def check_allowed(operation: Operation, spec: FunctionSpec) -> None:
    """Raise Forbidden unless a function with this spec may do that. A deploy checks the rights of its volumes. It may
    use the queues and dicts of its own app."""
    if not isinstance(operation, (PutVolumePart, CommitVolume)):
        home = home_of(spec.name)
        if home_of(full_name_at(operation.name, home)) != home:
            raise Forbidden(f"{operation.name} is in another app: functions use the queues and dicts of their own.")
        return
    if any(mount.name == operation.name and mount.writable for mount in spec.mounts):
        return
    raise Forbidden(
        f"{spec.name} does not declare the volume {operation.name[:130]!r} with writable=True, so it cannot change it"
    )
