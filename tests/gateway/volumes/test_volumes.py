"""Volumes of a gateway on a bus: commits, their races and limits, and the collection of files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gpufn_core.errors import BusUnavailable, Conflict
from gpufn_core.ids import digest_of
from gpufn_core.protocol import subjects
from gpufn_core.spec.volume_spec import MAX_VERSIONS, VolumeFile
from gpufn_gateway.volumes.volumes import VolumeFileCollection
from gpufn_platform.bus.storage import object_store
from tests.gateway.whole import VOLUME_LIMIT, Whole, gateway_on
from tests.waiting import until_async


@pytest.fixture
def on_bus(nats: Any) -> Callable[[], Any]:
    return lambda: gateway_on(nats)


async def put(gateway: Whole, name: str, path: str, data: bytes) -> dict[str, Any]:
    digest = digest_of(data)
    stored = await gateway.http.put(f"/v1/volumes/{name}/blobs/{digest}", content=data)
    assert stored.status_code == 201, stored.text
    return {"path": path, "size": len(data), "digest": digest}


async def commit(gateway: Whole, name: str, *files: dict[str, Any], **fields: Any) -> httpx.Response:
    return await gateway.http.post(f"/v1/volumes/{name}/commits", json={"put": files, **fields})


async def paths(gateway: Whole, name: str, version: int | None = None) -> list[str]:
    query = "" if version is None else f"?version={version}"
    tree = (await gateway.http.get(f"/v1/volumes/{name}/tree{query}")).json()
    return [file["path"] for file in tree["files"]]


async def test_each_commit_is_a_version(on_bus: Any) -> None:
    async with on_bus() as gateway:
        a, b = await put(gateway, "versions", "d/a", b"a"), await put(gateway, "versions", "b", b"b")
        numbers = [
            (await commit(gateway, "versions", a)).json()["number"],
            (await commit(gateway, "versions", b)).json()["number"],
            (await commit(gateway, "versions", b)).json()["number"],  # changes nothing
            (await commit(gateway, "versions", remove=["d/"])).json()["number"],
        ]
        assert numbers == [1, 2, 2, 3]
        assert [await paths(gateway, "versions", number) for number in (1, 2, 3)] == [["d/a"], ["b", "d/a"], ["b"]]
        assert (await gateway.http.get(f"/v1/volumes/versions/blobs/{a['digest']}")).content == b"a"
        assert (await gateway.http.get("/v1/volumes/versions/tree?version=9")).status_code == 404
        assert (await gateway.http.get(f"/v1/volumes/versions/blobs/{'0' * 64}")).status_code == 404


async def test_a_client_that_knows_the_digest_of_a_stored_file_can_read_it(on_bus: Any) -> None:
    """A limit of volumes, which docs/trust.md names: files are stored once for all teams."""
    async with on_bus() as gateway:
        file = await put(gateway, "theirs", "salaries", b"of a team")
        await commit(gateway, "theirs", file)
        answer = await commit(gateway, "ours", file)
        assert answer.status_code == 201, answer.text
        assert (await gateway.http.get(f"/v1/volumes/ours/blobs/{file['digest']}")).content == b"of a team"


async def test_simultaneous_commits_all_succeed(on_bus: Any) -> None:
    async with on_bus() as gateway:
        files = [await put(gateway, "races", f"f{number}", b"%d" % number) for number in range(8)]
        answers = await asyncio.gather(*(commit(gateway, "races", file) for file in files))
        assert sorted(answer.json()["number"] for answer in answers) == list(range(1, 9))
        assert await paths(gateway, "races") == [f"f{number}" for number in range(8)]
        stale = await commit(gateway, "races", files[0], remove=["f1"], base=3)
        assert (stale.status_code, stale.json()["code"]) == (409, "conflict")


async def test_a_crash_during_a_commit_leaves_the_old_version(on_bus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_bus() as gateway:
        a, b = await put(gateway, "crash", "a", b"old"), await put(gateway, "crash", "a", b"new")
        await commit(gateway, "crash", a)

        async def broken(*_: Any) -> None:
            raise BusUnavailable("the gateway died")

        with monkeypatch.context() as patch:
            patch.setattr(gateway.volumes, "_write", broken)
            assert (await commit(gateway, "crash", b)).status_code == 503
        assert (await gateway.volumes.tree("crash")).files == (VolumeFile("a", 3, a["digest"]),)
        assert (await commit(gateway, "crash", b)).json()["number"] == 2


@pytest.mark.parametrize("path", ["../a", "/a", "d/../a", "a//b", "", ".", "a\\b", "a\0b", "a\nb", "x" * 300])
async def test_a_path_that_leaves_the_volume_is_refused(on_bus: Any, path: str) -> None:
    async with on_bus() as gateway:
        file = await put(gateway, "paths", "a", b"a")
        assert (await commit(gateway, "paths", file | {"path": path})).status_code == 422
        assert (await gateway.http.get("/v1/volumes/paths")).json()["code"] == "data_not_found"


async def test_a_file_that_is_absent_cut_or_damaged_is_refused(on_bus: Any) -> None:
    async with on_bus() as gateway:
        digest = digest_of(b"whole")
        url = f"/v1/volumes/damaged/blobs/{digest}"
        assert (await gateway.http.put(url, content=b"whol")).status_code == 422
        assert (await gateway.http.put(url, content=b"wh0le")).status_code == 422
        asked = await gateway.http.post("/v1/volumes/damaged/missing", json={"digests": [digest]})
        assert asked.json() == {"missing": [digest]}
        absent = {"path": "a", "size": 5, "digest": digest}
        assert (await commit(gateway, "damaged", absent)).status_code == 422
        file = await put(gateway, "damaged", "a", b"whole")
        assert (await commit(gateway, "damaged", file | {"size": 4})).status_code == 422
        assert (await commit(gateway, "damaged", file, file | {"path": "a/b"})).status_code == 422
        assert (await commit(gateway, "damaged", remove=["nothing"])).status_code == 422


async def test_a_volume_has_a_largest_size_and_its_team_a_storage_limit(on_bus: Any) -> None:
    async with on_bus() as gateway:
        for number in range(3):
            file = await put(gateway, "huge", f"f{number}", bytes([number]) * (VOLUME_LIMIT // 2))
            answer = await commit(gateway, "huge", file)
        assert (answer.status_code, answer.json()["code"]) == (413, "payload_too_large")
        team = {"owns": ["volumes-of/team/*"], "limits": {"stored_bytes": 10}}
        assert (await gateway.http.put("/v1/teams/small", json=team)).status_code == 200
        await until_async(lambda: gateway.registry.teams.get("small") is not None)
        first, second = [await put(gateway, "volumes-of/team/v", name, name.encode() * 6) for name in "ab"]
        assert (await commit(gateway, "volumes-of/team/v", first)).status_code == 201
        await until_async(lambda: gateway.volumes.exists("volumes-of/team/v"))
        refused = await commit(gateway, "volumes-of/team/v", second)
        assert (refused.status_code, refused.json()["retryable"]) == (409, False)
        assert await paths(gateway, "volumes-of/team/v") == ["a"]
        assert (await gateway.http.delete("/v1/teams/small")).status_code == 204


async def test_files_that_no_kept_version_names_are_collected(on_bus: Any) -> None:
    async with on_bus() as gateway:
        first = await put(gateway, "collected", "a", b"first")
        for data in (b"first", *(b"%d" % number for number in range(MAX_VERSIONS))):
            await commit(gateway, "collected", await put(gateway, "collected", "a", data))
        await put(gateway, "collected", "a", b"never committed")
        record = await gateway.volumes.read("collected")
        assert [version.number for version in record.versions] == list(range(2, MAX_VERSIONS + 2))
        young = VolumeFileCollection(gateway.volumes, gateway.clock, 3600.0)
        await young.step()
        assert await gateway.volumes.has_file(first["digest"])
        await VolumeFileCollection(gateway.volumes, gateway.clock, -60.0).step()
        stored = {blob.digest for blob in await object_store.blobs(gateway.bus, subjects.VOLUME_FILES)}
        assert not stored & {first["digest"], digest_of(b"never committed")}
        assert stored >= await gateway.volumes.named_files()


async def test_a_deleted_volume_disappears(on_bus: Any) -> None:
    async with on_bus() as gateway:
        await commit(gateway, "gone", await put(gateway, "gone", "a", b"a"))
        await until_async(lambda: gateway.volumes.exists("gone"))
        assert (await gateway.http.delete("/v1/volumes/gone")).status_code == 204
        assert (await gateway.http.delete("/v1/volumes/gone")).json()["code"] == "data_not_found"
        assert (await gateway.http.delete("/v1/volumes/A-%20-b")).status_code == 422


async def test_too_many_concurrent_commits_are_a_conflict(on_bus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_bus() as gateway:
        file = await put(gateway, "busy", "a", b"a")

        async def lost(*_: Any) -> None:
            raise Conflict("another client was faster")

        monkeypatch.setattr(gateway.volumes, "_write", lost)
        assert (await commit(gateway, "busy", file)).json()["code"] == "conflict"
