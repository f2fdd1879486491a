"""Requests of workers for data, on a real bus: files of volumes in parts, and stored values."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.team import Team, TeamLimits
from gpufn_core.errors import Conflict, DataNotFound, Forbidden, GpufnError, InvalidInput, InvalidSpec, PayloadTooLarge
from gpufn_core.ids import digest_of
from gpufn_core.protocol import codec, subjects
from gpufn_core.protocol.data import (
    FILE_BYTES,
    STORED,
    AdmitValue,
    CommitVolume,
    DataReply,
    DataRequest,
    GetItem,
    GetValue,
    PutValue,
    PutVolumePart,
    StoredValue,
    team_of_value,
    value_tag,
)
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.volume_spec import VolumeChange, VolumeFile, VolumeMount
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.queue import large_bodies
from gpufn_platform.shared_bodies.bodies import SharedBodies
from gpufn_platform.volume_store.on_bus import BusStore
from gpufn_runtime.runner.workers.data_requests import DataRequests
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies

_WORKER = "w-1"
_unpack_request: codec.Unpacker[DataRequest] = codec.Unpacker(DataRequest)
_DATA = b"0123456789"


class Worker:
    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus = bus
        self.folder = SharedBodies(folder / _WORKER)
        self.data = DataRequests(bus, NodeSharedBodies(folder, "r-1"), BusStore(bus, purges=False))
        self.spec = FunctionSpec(
            name="prod/search/f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),),
            volumes=(VolumeMount("v", writable=True), VolumeMount("read-only")),
        )  # fmt: skip

    async def send(self, operation: Any, value: bytes = b"") -> Any:
        return await self.data.execute(_WORKER, self.spec.name, self.spec, codec.pack(operation, value))

    async def part(self, data: bytes, offset: int, *, digest: str = digest_of(_DATA), size: int = 10) -> bytes:
        return (await self.send(PutVolumePart("v", digest, size, offset), data)).value  # type: ignore[no-any-return]

    async def refused(self, request: Awaitable[Any]) -> str:
        with pytest.raises(GpufnError) as caught:
            await request
        return caught.value.code


@pytest.fixture
def with_worker(nats: Any, tmp_path: Path) -> Callable[[Callable[[Worker], Awaitable[None]]], None]:
    @contextlib.asynccontextmanager
    async def connected() -> AsyncIterator[Worker]:
        bus = await Bus.connect(nats.url, name="runner")
        try:
            await object_store.ensure_bucket(bus, subjects.VOLUME_FILES)
            await large_bodies.ensure_buckets(bus)
            yield Worker(bus, tmp_path)
        finally:
            await bus.close()

    def run(scenario: Callable[[Worker], Awaitable[None]]) -> None:
        async def main() -> None:
            async with connected() as worker, asyncio.timeout(60):
                await scenario(worker)

        asyncio.run(main())

    return run


def test_a_file_arrives_in_parts_and_is_not_sent_twice(with_worker: Any) -> None:
    async def scenario(worker: Worker) -> None:
        assert [await worker.part(_DATA[:4], 0), await worker.part(_DATA[4:], 4)] == [b"", STORED]
        assert await object_store.get(worker.bus, subjects.VOLUME_FILES, digest_of(_DATA)) == _DATA
        assert await worker.part(_DATA[:4], 0) == STORED

    with_worker(scenario)


def test_parts_that_do_not_fit_store_nothing(with_worker: Any) -> None:
    async def scenario(worker: Worker) -> None:
        digest = digest_of(b"other file")
        assert await worker.refused(worker.part(b"file", 6, digest=digest)) == Conflict.code
        await worker.part(b"other", 0, digest=digest)
        assert await worker.refused(worker.part(b"le", 8, digest=digest)) == InvalidInput.code
        await worker.part(b"other", 0, digest=digest)
        assert await worker.refused(worker.part(b" fild", 5, digest=digest)) == InvalidInput.code
        assert await worker.refused(worker.part(b"too long for it", 0, digest=digest)) == InvalidInput.code
        assert not await object_store.touch(worker.bus, subjects.VOLUME_FILES, digest)

    with_worker(scenario)


def test_the_size_of_a_file_and_the_uncommitted_bytes_of_a_worker_are_limited(with_worker: Any) -> None:
    async def scenario(worker: Worker) -> None:
        large = worker.part(b"", 0, digest=digest_of(b"large"), size=FILE_BYTES + 1)
        assert await worker.refused(large) == PayloadTooLarge.code
        worker.data.uncommitted_bytes = 20
        assert await worker.part(b"first file", 0, digest=digest_of(b"first file")) == STORED
        second = digest_of(b"other file")
        await worker.part(b"other", 0, digest=second)
        assert await worker.refused(worker.part(b"!", 0, digest=digest_of(b"!"), size=1)) == PayloadTooLarge.code
        assert await worker.refused(worker.part(b"x", 9, digest=second)) == InvalidInput.code  # five bytes are stored
        assert await worker.refused(worker.part(b"other", 0, digest=second)) == PayloadTooLarge.code
        answering = worker.bus.subscribe(
            subjects.DATA_REQUESTS, lambda message: worker.bus.publish(message.reply, codec.pack(DataReply(), b""))
        )
        change = VolumeChange(put=(VolumeFile("a", 10, digest_of(b"first file")),))
        await worker.send(CommitVolume("v", change))
        answering.unsubscribe()
        assert await worker.part(b"other file", 0, digest=second) == STORED

    with_worker(scenario)


def test_an_upload_ends_with_its_worker(with_worker: Any) -> None:
    async def scenario(worker: Worker) -> None:
        digest = digest_of(b"abandoned!")
        await worker.part(b"aband", 0, digest=digest)
        worker.data.forget(_WORKER)
        assert await worker.refused(worker.part(b"oned!", 5, digest=digest)) == Conflict.code

    with_worker(scenario)


def test_a_function_may_access_only_the_data_of_its_spec_and_app(with_worker: Any) -> None:
    async def scenario(worker: Worker) -> None:
        for name in ("read-only", "other"):
            part = PutVolumePart(name, digest_of(b""), 0, 0)
            assert await worker.refused(worker.send(part)) == Forbidden.code
        assert await worker.refused(worker.send(GetItem("prod/ads/jobs", 0, 60))) == Forbidden.code
        assert await worker.refused(worker.send(GetItem("jobs.>", 0, 60))) == InvalidSpec.code
        garbage = worker.data.execute(_WORKER, worker.spec.name, worker.spec, b"\0\0\0\1\xc1")
        assert await worker.refused(garbage) == InvalidInput.code

    with_worker(scenario)


def test_a_node_fetches_a_value_once_and_makes_a_file_for_each_reader(with_worker: Any) -> None:
    async def scenario(worker: Worker) -> None:
        id_ = stored(await worker.send(PutValue(60.0), _DATA)).id
        names = [(await worker.send(GetValue(id_))).shared_body]
        await large_bodies.remove(worker.bus, subjects.VALUES, StoredValue(id_, 0).reference)
        names.append((await worker.send(GetValue(id_))).shared_body)
        assert names[0] != names[1]
        assert [bytes(worker.folder.take(name)) for name in names] == [_DATA, _DATA]
        for unknown in ("", "x", f"waited-{'0' * 26}.{'g' * 64}", "../../x"):
            assert await worker.refused(worker.send(GetValue(unknown))) == DataNotFound.code

    with_worker(scenario)


def test_copies_of_values_make_room_for_others(with_worker: Any) -> None:
    async def scenario(worker: Worker) -> None:
        worker.data.values.kept_bytes = 2 * len(_DATA)
        ids = [stored(await worker.send(PutValue(60.0), _DATA)).id for _ in range(3)]
        for id_ in ids:
            await worker.send(GetValue(id_))
            worker.folder.remove_all()
        for id_ in ids:
            await large_bodies.remove(worker.bus, subjects.VALUES, StoredValue(id_, 0).reference)
        assert (await worker.send(GetValue(ids[2]))).shared_body
        assert await worker.refused(worker.send(GetValue(ids[0]))) == DataNotFound.code

    with_worker(scenario)


def stored(reply: Any) -> StoredValue:
    return msgspec.msgpack.decode(reply.value, type=StoredValue)


def test_a_value_of_a_team_with_a_limit_is_stored_after_a_gateway_agrees(with_worker: Any) -> None:
    async def scenario(worker: Worker) -> None:
        team = Team(name="own", owns=("prod/search/*",), limits=TeamLimits(stored_bytes=10))
        bodies = NodeSharedBodies(Path(worker.folder.folder).parent, "r-1")
        worker.data = DataRequests(worker.bus, bodies, BusStore(worker.bus, purges=False), lambda _: team)
        asked: list[Any] = []
        errors = [None, Conflict("the team stores too much").info()]

        def answer(message: Any) -> None:
            asked.append(_unpack_request(message.payload)[0])
            worker.bus.publish(message.reply, codec.pack(DataReply(errors.pop(0))))

        worker.bus.subscribe(subjects.DATA_REQUESTS, answer)
        stored = msgspec.msgpack.decode((await worker.send(PutValue(60.0), b"value")).value, type=StoredValue)
        assert team_of_value(stored.id) == value_tag("own")
        assert await worker.refused(worker.send(PutValue(60.0), b"more")) == Conflict.code
        assert [each.operation for each in asked] == [AdmitValue("", 5), AdmitValue("", 4)]
        (kept,) = await object_store.blobs(worker.bus, subjects.VALUES)
        assert team_of_value(kept.digest) == value_tag("own")

    with_worker(scenario)
