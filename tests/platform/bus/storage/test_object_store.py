from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import IO, Any

import pytest

from gpufn_core.errors import ArtifactUnavailable, BusUnavailable, InvalidInput
from gpufn_core.ids import digest_of
from gpufn_core.protocol import subjects
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, ordered_reader, streams
from tests import blobs
from tests.platform.conftest import lead_astray


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (20 << 20) + 1])
async def test_a_blob_is_returned_unchanged(connect: Any, nats: Any, size: int) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "blobs")
    data = os.urandom(size)
    digest = await object_store.put(bus, "blobs", data)
    assert digest == digest_of(data)
    assert await object_store.get(bus, "blobs", digest) == data
    await blobs.delete(bus, "blobs", digest)
    await blobs.delete(bus, "blobs", digest)
    assert not await blobs.exists(bus, "blobs", digest)


async def test_the_same_bytes_are_stored_once_also_by_two_at_a_time(connect: Any, nats: Any) -> None:
    bus, other = await connect(nats), await connect(nats)
    await object_store.ensure_bucket(bus, "once")
    data = os.urandom(3 << 20)
    digests = await asyncio.gather(object_store.put(bus, "once", data), object_store.put(other, "once", data))
    assert set(digests) == {await object_store.put(bus, "once", data)}
    info = await bus.js("STREAM.INFO.OBJ_once")
    assert info["state"]["messages"] == 4
    assert await object_store.get(other, "once", digests[0]) == data


async def test_an_absent_blob_is_reported(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "blobs")
    with pytest.raises(ArtifactUnavailable, match=r"blobs .* abc"):
        await object_store.get(bus, "blobs", "abc")


async def test_a_damaged_blob_is_never_handed_out(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "damaged")
    digest = await object_store.put(bus, "damaged", bytes(2 << 20))
    chunk = await streams.next_message(bus, "OBJ_damaged", "$O.damaged.C.>", 2)
    assert chunk is not None
    await streams.delete_message(bus, "OBJ_damaged", chunk.seq)
    await bus.publish_stored(chunk.subject, b"\1" + chunk.payload[1:])
    with pytest.raises(ArtifactUnavailable, match="damaged: put it again"):
        await object_store.get(bus, "damaged", digest)


@pytest.mark.parametrize("size", [0, (20 << 20) + 1])
async def test_a_file_is_returned_unchanged(connect: Any, nats: Any, tmp_path: Path, size: int) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "files")
    given, back = tmp_path / "given", tmp_path / "back"
    given.write_bytes(os.urandom(size))
    digest = digest_of(given.read_bytes())
    assert await object_store.put_file(bus, "files", given) == (digest, True)
    assert await object_store.put_file(bus, "files", given) == (digest, False)
    await object_store.get_file(bus, "files", digest, back)
    assert back.read_bytes() == given.read_bytes()


async def test_a_blob_kept_again_by_its_owner_has_the_new_expiry(connect: Any, nats: Any, tmp_path: Path) -> None:
    """A reused id may have the same result, while the first result is about to expire."""
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "again", expires=True)
    path = tmp_path / "result"
    path.write_bytes(os.urandom((1 << 20) + 1))
    for ttl_s in (100.0, 900.0):
        digest, _ = await object_store.keep_file(bus, "again", path, owner="mine", ttl_s=ttl_s)
    assert digest == digest_of(path.read_bytes())
    async with contextlib.aclosing(object_store.read(bus, "again", digest, owner="mine")) as parts:
        assert b"".join([part async for part in parts]) == path.read_bytes()
    stored = await ordered_reader.collect(bus, "OBJ_again", "$O.again.>", since_seq=1)
    assert [message.headers["Nats-TTL"] for message in stored] == ["100s", "100s", "900s", "900s", "900s"]


async def test_a_blob_that_a_node_lacks_comes_from_the_leader(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    await streams.ensure_streams(bus)
    await object_store.ensure_bucket(bus, "behind")
    data = os.urandom(3 << 20)
    digest = await object_store.put(bus, "behind", data)
    lead_astray(bus, monkeypatch, f"{jetstream.API}DIRECT.GET.{subjects.RESULTS}")
    assert await object_store.get(bus, "behind", digest) == data


async def test_a_bucket_without_a_responder_has_lost_nothing(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "away")
    digest = await object_store.put(bus, "away", b"there")
    lead_astray(bus, monkeypatch, "nobody.listens.here")
    with pytest.raises(BusUnavailable, match=r"^away "):
        await object_store.get(bus, "away", digest)


async def test_a_file_that_could_not_be_fetched_whole_is_not_there(connect: Any, nats: Any, tmp_path: Path) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "lacking")
    digest = await object_store.put(bus, "lacking", os.urandom(12 << 20))
    chunk = await streams.next_message(bus, "OBJ_lacking", "$O.lacking.C.>", 1)
    assert chunk is not None
    await streams.delete_message(bus, "OBJ_lacking", chunk.seq + 9)
    with pytest.raises(ArtifactUnavailable, match="lacks chunks"):
        await object_store.get_file(bus, "lacking", digest, tmp_path / "back")
    with pytest.raises(ArtifactUnavailable, match="no folder/back"):
        await object_store.get_file(bus, "lacking", digest, tmp_path / "no folder" / "back")
    assert os.listdir(tmp_path) == []


async def _of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_a_stream_of_parts_of_any_length_is_one_blob(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "parts")
    parts = [os.urandom(size) for size in (1, 0, 3 << 20, 700_000, 700_000)]
    data = b"".join(parts)
    digest = digest_of(data)
    await object_store.put_stream(bus, "parts", digest, len(data), _of(*parts))
    assert await object_store.get(bus, "parts", digest) == data


async def test_a_stream_with_a_wrong_digest_leaves_nothing(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "announced")
    data = os.urandom(12 << 20)
    digest = digest_of(data)
    for size, given, why in (
        (len(data), data[:-1], "fewer bytes than the 12,582,912 announced"),
        (len(data), data + b"1", "more bytes"),
        (len(data), bytes(len(data)), f"do not have the digest {digest[:12]}"),
    ):
        with pytest.raises(InvalidInput, match=why):
            await object_store.put_stream(bus, "announced", digest, size, _of(given))

    async def breaks() -> AsyncIterator[bytes]:
        yield data[: 4 << 20]
        raise RuntimeError("the sender left")

    with pytest.raises(RuntimeError, match="the sender left"):
        await object_store.put_stream(bus, "announced", digest, len(data), breaks())
    assert (await bus.js("STREAM.INFO.OBJ_announced"))["state"]["messages"] == 0
    assert not await blobs.exists(bus, "announced", digest)


async def test_a_blob_that_was_touched_is_young_again_and_stays(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "young")
    assert not await object_store.touch(bus, "young", "0" * 64)
    digest = await object_store.put(bus, "young", b"bytes")
    (seen,) = await object_store.blobs(bus, "young")
    assert (seen.digest, seen.size) == (digest, 5)
    assert await object_store.touch(bus, "young", digest)
    (again,) = await object_store.blobs(bus, "young")
    assert again.put_at > seen.put_at
    assert not await object_store.remove(bus, "young", seen)
    assert await object_store.get(bus, "young", digest) == b"bytes"
    assert await object_store.remove(bus, "young", again)
    info = await bus.js("STREAM.INFO.OBJ_young")
    assert info["state"]["messages"] == 0
    await object_store.put(bus, "young", b"bytes")
    assert await object_store.get(bus, "young", digest) == b"bytes"


async def test_uploads_of_a_dead_process_are_removed(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "broken-off")
    await object_store.put(bus, "broken-off", bytes(3 << 20))
    for _ in range(2):
        await bus.publish_stored("$O.broken-off.C.unfinished", b"a chunk")
    newest = await streams.last_message(bus, "OBJ_broken-off", "$O.broken-off.C.unfinished")
    assert newest is not None
    assert await object_store.remove_unfinished(bus, "broken-off", newest.time) == 0
    assert await object_store.remove_unfinished(bus, "broken-off", newest.time + 1) == 1
    info = await bus.js("STREAM.INFO.OBJ_broken-off")
    assert info["state"]["messages"] == 4


class Opened:
    """A path that records which files were opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files: list[IO[Any]] = []

    def open(self, mode: str) -> IO[Any]:
        self.files.append(self._path.open(mode))
        return self.files[-1]

    def stat(self) -> os.stat_result:
        return self._path.stat()


async def test_a_file_that_is_kept_for_its_owner_is_read_once(connect: Any, nats: Any, tmp_path: Path) -> None:
    """A file that takes longer to hash than to store."""
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "mine", expires=True)
    (tmp_path / "result").write_bytes(data := os.urandom(3 << 20))
    path: Any = Opened(tmp_path / "result")
    kept = await object_store.keep_file(bus, "mine", path, owner="me", ttl_s=100)
    assert kept == (digest_of(data), len(data))
    assert len(path.files) == 1


@pytest.mark.parametrize("turns", range(1, 8))
def test_a_file_is_closed_whenever_its_reader_or_writer_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    async def chunks(*which: object) -> AsyncGenerator[bytes, None]:
        for _ in range(3):
            yield b"chunk"

    async def read(path: Any) -> None:
        async with contextlib.aclosing(object_store._parts_of_file(path)) as parts:
            async for _ in parts:
                pass

    async def cancelled(doing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(doing)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    bus: Any = None
    source, target = Opened(tmp_path / "source"), Opened(tmp_path / "target")
    (tmp_path / "source").write_bytes(b"bytes")
    monkeypatch.setattr(object_store, "read", chunks)
    asyncio.run(cancelled(read(source)))  # wait until its threads have ended
    asyncio.run(cancelled(object_store._write(bus, "", "", target)))  # type: ignore[arg-type]
    assert [file.name for file in (*source.files, *target.files) if not file.closed] == []


# --- invalid blobs ----------------------------------------------------------------------------------------------------


async def _description(bus: Bus, bucket: str) -> ordered_reader.StoredMessage:
    """The description of the only blob."""
    message = await streams.last_message(bus, f"OBJ_{bucket}", f"$O.{bucket}.M.>")
    assert message is not None
    return message


@pytest.mark.parametrize("put_file", [False, True])
async def test_a_blob_that_lost_a_chunk_is_absent_and_whole_again_once_it_is_put_again(
    connect: Any, nats: Any, tmp_path: Path, put_file: bool
) -> None:
    bus, bucket = await connect(nats), f"holes-{put_file}"
    await object_store.ensure_bucket(bus, bucket)
    path, data = tmp_path / "file", os.urandom(3 << 20)
    path.write_bytes(data)
    digest = await object_store.put(bus, bucket, data)
    chunk = await streams.next_message(bus, f"OBJ_{bucket}", f"$O.{bucket}.C.>", 1)
    assert chunk is not None
    await streams.delete_message(bus, f"OBJ_{bucket}", chunk.seq)
    assert not await object_store.touch(bus, bucket, digest)
    assert not await object_store.touch(bus, bucket, digest)
    with pytest.raises(ArtifactUnavailable, match="lacks chunks"):
        await object_store.get(bus, bucket, digest)
    assert (
        (await object_store.put_file(bus, bucket, path))[0] if put_file else await object_store.put(bus, bucket, data)
    ) == digest
    assert await object_store.get(bus, bucket, digest) == data


@pytest.mark.parametrize(
    "change",
    [
        lambda said: b"",
        lambda said: said[: len(said) // 2],
        lambda said: b"[]",
        lambda said: b'{"name": "another"}',
        lambda said: said.replace(b'"chunks":1', b'"chunks":"one"'),
        lambda said: re.sub(rb'"nuid":"\w+"', b'"nuid":">"', said),
        lambda said: re.sub(rb'"name":"\w{4}', b'"name":"0000', said),
    ],
    ids=["empty", "half", "a list", "of another client", "a number in words", "all uploads", "of other bytes"],
)
async def test_an_unreadable_description_is_reported_and_replaced(
    connect: Any, nats: Any, change: Callable[[bytes], bytes]
) -> None:
    bus = await connect(nats)
    bucket = f"doubtful-{secrets.token_hex(4)}"
    await object_store.ensure_bucket(bus, bucket)
    digest = await object_store.put(bus, bucket, b"bytes")
    said = await _description(bus, bucket)
    await bus.publish_stored(said.subject, change(said.payload))
    other = await object_store.put(bus, bucket, b"other bytes")
    assert [blob.digest for blob in await object_store.blobs(bus, bucket)] == [other]
    assert not await blobs.exists(bus, bucket, digest)
    with pytest.raises(ArtifactUnavailable, match=f"description of {digest[:12]} in {bucket}"):
        await object_store.get(bus, bucket, digest)
    assert await object_store.put(bus, bucket, b"bytes") == digest
    assert await object_store.get(bus, bucket, digest) == b"bytes"
    assert await object_store.get(bus, bucket, other) == b"other bytes"
    await blobs.delete(bus, bucket, digest)
    assert not await blobs.exists(bus, bucket, digest)


async def test_a_blob_deleted_by_another_nats_client_can_be_put_again(connect: Any, nats: Any) -> None:
    bus = await connect(nats)
    await object_store.ensure_bucket(bus, "deleted")
    digest = await object_store.put(bus, "deleted", b"bytes")
    said = await _description(bus, "deleted")
    await bus.publish_stored(said.subject, said.payload[:-1].replace(b',"deleted":false', b"") + b',"deleted":true}')
    with pytest.raises(ArtifactUnavailable, match="deleted has no"):
        await object_store.get(bus, "deleted", digest)
    await object_store.put(bus, "deleted", b"bytes")
    assert await object_store.get(bus, "deleted", digest) == b"bytes"


@pytest.mark.parametrize(
    "broken", [BusUnavailable("it went away"), asyncio.CancelledError()], ids=["lost", "cancelled"]
)
async def test_an_upload_that_breaks_off_at_its_end_leaves_a_whole_blob_or_none(
    connect: Any, nats: Any, monkeypatch: pytest.MonkeyPatch, broken: BaseException
) -> None:
    """The description was stored, but its sender never receives the acknowledgement."""
    bus = await connect(nats)
    bucket = f"end-{type(broken).__name__}"
    await object_store.ensure_bucket(bus, bucket)
    publish = bus.publish_stored

    async def unacknowledged(subject: str, payload: bytes, **more: Any) -> Any:
        stored = await publish(subject, payload, **more)
        if ".M." in subject:
            raise broken
        return stored

    monkeypatch.setattr(bus, "publish_stored", unacknowledged)
    with pytest.raises(type(broken)):
        await object_store.put(bus, bucket, b"bytes")
    digest = digest_of(b"bytes")
    assert await blobs.exists(bus, bucket, digest)
    assert await object_store.get(bus, bucket, digest) == b"bytes"
