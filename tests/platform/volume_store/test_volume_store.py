"""Both stores of the files of volumes, with a real NATS server and a real S3 server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import ArtifactUnavailable, InvalidInput
from gpufn_core.ids import digest_of, new_ulid
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.volume_store.choose import volume_store
from gpufn_platform.volume_store.store import StoredFile, VolumeStore
from tests.s3_server import s3_server

Check = Callable[[VolumeStore], Awaitable[None]]
LARGE = bytes(range(256)) * 20_000


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("s3") / "data"
    (folder / "ours").mkdir(parents=True)
    with s3_server(folder) as environ:
        yield environ


@pytest.fixture(params=["bus", "s3"])
def on_store(request: pytest.FixtureRequest) -> Callable[[Check], None]:
    """Run a check with an empty store."""
    address, environ, nats = "", {}, request.getfixturevalue("nats")
    if request.param == "s3":
        address, environ = f"s3://ours/{new_ulid()}", request.getfixturevalue("aws")

    async def run(check: Check) -> None:
        bus = await Bus.connect(nats.url, name="test")
        try:
            await object_store.ensure_bucket(bus, subjects.VOLUME_FILES)
            store = volume_store(address, environ, bus, SystemClock())
            try:
                await check(store)
            finally:
                await store.aclose()
        finally:
            await bus.close()

    return lambda check: asyncio.run(run(check))


async def parts(*data: bytes) -> AsyncIterator[bytes]:
    for part in data:
        yield part


async def listed(store: VolumeStore, digest: str) -> StoredFile:
    return next(file for file in await store.files() if file.digest == digest)


def test_a_stored_file_is_read_listed_and_removed(on_store: Callable[[Check], None]) -> None:
    async def check(store: VolumeStore) -> None:
        digest, half = digest_of(LARGE), len(LARGE) // 2
        assert await store.touch(digest) is None
        await store.put_stream(digest, len(LARGE), parts(LARGE[:half], LARGE[half:]))
        assert b"".join([part async for part in store.read(digest)]) == LARGE
        small = await store.put(b"small")
        assert (await store.put(b"small"), await store.touch(small), await store.get(small)) == (small, 5, b"small")
        assert {(file.digest, file.size) for file in await store.files()} >= {(digest, len(LARGE)), (small, 5)}
        # This file was not touched: rclone lists a file with its time before a touch.
        assert await store.remove(await listed(store, digest))
        assert await store.touch(digest) is None
        with pytest.raises(ArtifactUnavailable):
            await store.get(digest)

    on_store(check)


def test_an_empty_file_is_a_file(on_store: Callable[[Check], None]) -> None:
    async def check(store: VolumeStore) -> None:
        await store.put_stream(digest_of(b""), 0, parts())
        assert (await store.touch(digest_of(b"")), await store.get(digest_of(b""))) == (0, b"")

    on_store(check)


@pytest.mark.parametrize(
    "sent", [(b"an",), (b"another one",), (b"onother",), ()], ids=["short", "long", "other", "none"]
)
def test_a_file_that_is_not_the_announced_one_is_not_stored(
    on_store: Callable[[Check], None], sent: tuple[bytes, ...]
) -> None:
    async def check(store: VolumeStore) -> None:
        digest = digest_of(b"another")
        with pytest.raises(InvalidInput):
            await store.put_stream(digest, 7, parts(*sent))
        assert await store.touch(digest) is None

    on_store(check)


def test_a_client_that_leaves_stores_nothing(on_store: Callable[[Check], None]) -> None:
    async def leaves() -> AsyncIterator[bytes]:
        yield LARGE[:1000]
        raise ConnectionResetError

    async def check(store: VolumeStore) -> None:
        with pytest.raises(ConnectionResetError):
            await store.put_stream(digest_of(LARGE), len(LARGE), leaves())
        assert await store.touch(digest_of(LARGE)) is None

    on_store(check)


@pytest.mark.parametrize(
    "change",
    [{"AWS_SECRET_ACCESS_KEY": "wrong"}, {"AWS_ACCESS_KEY_ID": ""}, {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}],
    ids=["wrong key", "no key", "nothing there"],
)
def test_a_store_that_refuses_or_is_away_is_an_error(
    aws: dict[str, str], change: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufn_platform.volume_store.s3._RETRY_DELAYS_S", ())
    bus: Any = None
    store = volume_store("s3://ours/refused", aws | change, bus, SystemClock())

    async def check() -> None:
        for request in (store.files, lambda: store.put(b"x"), lambda: store.get(digest_of(b"x"))):
            with pytest.raises(ArtifactUnavailable):
                await request()
        await store.aclose()

    asyncio.run(check())


@pytest.mark.parametrize("address", ["s3:/ours", "s3://", "ours", "s3://Ours/x", "s3://ours/a b"])
def test_an_address_that_is_none_is_refused(address: str, tmp_path: Path) -> None:
    bus: Any = None
    with pytest.raises(ValueError, match="s3://bucket"):
        volume_store(address, {}, bus, SystemClock())
