"""The node's cache of weights: fetches, sharing, room, and origins that misbehave."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import stat
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.errors import ArtifactUnavailable
from gpufn_core.remove_folder import remove_tree
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec
from gpufn_platform.process.clock import SystemClock
from gpufn_runtime.agent.cache import transfer_rate, weights_fetch
from gpufn_runtime.agent.cache import weights as module
from gpufn_runtime.agent.cache.weights import WeightsCache
from gpufn_runtime.agent.cache.weights_disk import PartFile, WeightsDisk, WrongContent
from gpufn_runtime.agent.cache.weights_fetch import WeightsFetch
from tests.runtime.agent.conftest import Node as AgentNode
from tests.runtime.agent.conftest import Run as AgentRun
from tests.waiting import until_async
from tests.weights_origins import COMMIT, Origins, running_origins, sha256

_FILES = {"config.json": b"{}", "model.bin": bytes(range(256)) * 100, "sub/other.bin": b"other" * 100}


def hub(files: dict[str, bytes] = _FILES, **fields: Any) -> WeightsSpec:
    manifest = tuple(WeightsFile(name, len(data), sha256(data)) for name, data in files.items())
    return WeightsSpec(source="hf://org/model", commit=COMMIT, files=manifest, **fields)


def local(name: str, *files: bytes) -> WeightsSpec:
    return WeightsSpec(
        source=name, files=tuple(WeightsFile(sha256(data)[:8], len(data), sha256(data)) for data in files)
    )


class CacheNode:
    """A cache on a disk that keeps no spare space, the platform's store, and the origins."""

    def __init__(self, root: Path, origins: Origins, limit_bytes: int) -> None:
        self.root, self.origins, self.limit_bytes = root, origins, limit_bytes
        self.environ = origins.environ()
        self.store: dict[str, bytes] = {}
        self.read: list[str] = []
        self.in_use: set[str] | None = set()
        self.restart()

    def restart(self) -> None:
        fetch = WeightsFetch(self._read, self.environ, SystemClock(), retry_delays_s=(0.0, 0.0))
        self.cache = WeightsCache(self.root, fetch, self.limit_bytes)
        self.cache.sweep()

    async def _read(self, digest: str) -> AsyncGenerator[bytes, None]:
        self.read.append(digest)
        if digest not in self.store:
            raise ArtifactUnavailable(f"gpufn_models has no {digest[:12]}.")
        yield self.store[digest]

    def put(self, name: str, *files: bytes) -> WeightsSpec:
        self.store |= {sha256(data): data for data in files}
        return local(name, *files)

    async def get(self, spec: WeightsSpec) -> Path:
        return await self.cache.get(spec, lambda: self.in_use)

    def names(self) -> list[str]:
        """The complete weights on the disk."""
        return sorted(path.name for path in (self.root / "folders").glob("*"))

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.root / "files").iterdir())


Run = Callable[..., None]


@pytest.fixture
def on_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(module, "_SPARE_BYTES", 0)
    with running_origins(dict(_FILES)) as origins:

        def run(test: Callable[[CacheNode], Awaitable[None]], limit_bytes: int = 1 << 30) -> None:
            async def main() -> None:
                async with asyncio.timeout(30):
                    await test(CacheNode(tmp_path / "weights", origins, limit_bytes))

            asyncio.run(main())

        yield run


def _content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_weights_of_a_hub_are_fetched_once(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        folders = await asyncio.gather(*[node.get(hub()) for _ in range(5)])
        assert len(set(folders)) == 1
        assert _content(folders[0]) == _FILES
        assert len(node.origins.downloads()) == len(_FILES)
        node.restart()
        assert await node.get(hub()) == folders[0]
        assert len(node.origins.downloads()) == len(_FILES)
        report = node.cache.report()
        assert (report.hits, report.misses, report.stored_bytes) == (1, 0, sum(map(len, _FILES.values())))
        assert (report.complete, report.bytes_per_s) == ((hub().digest,), None)
        assert stat.S_IMODE((folders[0] / "model.bin").stat().st_mode) == 0o444
        assert stat.S_IMODE((folders[0] / "sub").stat().st_mode) == 0o555

    on_cache(test)


def test_a_single_file_is_the_path(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        spec = WeightsSpec(
            source="hf://org/model/sub/other.bin",
            commit=COMMIT,
            is_file=True,
            files=(WeightsFile("other.bin", 500, sha256(b"other" * 100)),),
        )
        assert (await node.get(spec)).read_bytes() == b"other" * 100

    on_cache(test)


def test_a_hub_receives_the_nodes_token_and_a_cdn_does_not(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        node.origins.token = node.environ["HF_TOKEN"] = "hf_x"
        node.origins.redirects_to = node.origins.url.replace("127.0.0.1", "localhost")
        await node.get(hub())
        sent = [(path.startswith("/cdn/"), headers.get("authorization")) for _, path, headers in node.origins.requests]
        assert set(sent) == {(False, "Bearer hf_x"), (True, None)}

    on_cache(test)


def test_a_redirect_of_s3_is_not_followed(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        node.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"), "x")
        node.origins.redirects_to = node.origins.url.replace("127.0.0.1", "localhost")
        spec = WeightsSpec(source="s3://bucket", files=(WeightsFile("model.bin", 1, etag="e"),))
        with pytest.raises(ArtifactUnavailable, match="302"):
            await node.get(spec)
        assert len(node.origins.requests) == 1

    on_cache(test)


def test_a_token_with_other_characters_is_reported(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        node.environ["HF_TOKEN"] = "hf_\u2013"
        with pytest.raises(ArtifactUnavailable, match="HF_TOKEN"):
            await node.get(hub())

    on_cache(test)


def test_objects_of_s3_are_fetched_as_they_were_at_deploy(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        node.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        node.origins.keys = "key"
        data = _FILES["model.bin"]
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        spec = WeightsSpec(source="s3://bucket", files=(WeightsFile("model.bin", len(data), etag=etag),))
        assert _content(await node.get(spec)) == {"model.bin": data}
        changed = WeightsSpec(source="s3://bucket", files=(WeightsFile("model.bin", len(data), etag='"other"'),))
        with pytest.raises(ArtifactUnavailable, match="changed since the deploy"):
            await node.get(changed)

    on_cache(test)


def test_uploaded_weights_come_from_the_platforms_store(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        spec = node.put("./weights", b"a", b"b")
        assert sorted(_content(await node.get(spec)).values()) == [b"a", b"b"]
        node.store.clear()
        with pytest.raises(ArtifactUnavailable):
            await node.get(local("./weights", b"c"))

    on_cache(test)


def test_equal_files_are_fetched_and_stored_once(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        one, two = node.put("one", b"same", b"1"), node.put("two", b"same", b"2")
        first, second = await asyncio.gather(node.get(one), node.get(two))
        assert sorted(node.read) == sorted({sha256(data) for data in (b"same", b"1", b"2")})
        same = sha256(b"same")[:8]
        assert (first / same).samefile(second / same)

    on_cache(test)


def test_equal_files_of_another_source_are_fetched_although_the_first_fails(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        data = _FILES["model.bin"]
        node.origins.status = 404
        node.store[sha256(data)] = data
        gone = hub({"model.bin": data})
        uploaded = WeightsSpec(source="./a", files=gone.files)
        results = await asyncio.gather(*map(node.get, (gone, gone, uploaded)), return_exceptions=True)
        assert [isinstance(result, ArtifactUnavailable) for result in results] == [True, True, False]
        assert len(node.origins.downloads()) == 1

    on_cache(test)


def test_a_start_does_not_wait_for_the_files_of_prefetches(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        stalled = [{f"{fetch}-{number}": b"%d" % fetch + bytes(20 + number) for number in range(8)} for fetch in (1, 2)]
        for files in stalled:
            node.origins.served |= files
        node.origins.hold = threading.Event()
        try:
            node.cache.prefetch(map(hub, stalled), set)
            await until_async(lambda: len(node.origins.downloads()) == 4)
            small = {"small.bin": b"0123456789"}
            node.origins.served |= small
            assert _content(await node.get(hub(small))) == small
            assert len(node.origins.downloads()) == 5
        finally:
            node.origins.hold.set()
        await until_async(lambda: len(node.cache.report().complete) == 3)

    on_cache(test)


def test_the_rate_is_that_of_the_last_fetch_with_enough_bytes(on_cache: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(node: CacheNode) -> None:
        monkeypatch.setattr(transfer_rate, "_LEAST_BYTES", 10)
        await node.get(node.put("large", b"0123456789"))
        rate = node.cache.report().bytes_per_s
        assert rate
        await node.get(node.put("small", b"012"))
        assert node.cache.report().bytes_per_s == rate
        assert node.cache.report().fetched_bytes == 13

    on_cache(test)


def test_a_manifest_with_a_wrong_size_keeps_the_interrupted_file_of_another(tmp_path: Path) -> None:
    disk = WeightsDisk(tmp_path)
    disk.ensure()
    right = disk.part("a" * 64, 10)
    right.add(b"01234")
    right.close()
    wrong = disk.part("a" * 64, 3)
    with pytest.raises(WrongContent):
        wrong.add(b"01234")
    wrong.discard()
    assert disk.sizes() == {"a" * 64: 5}
    again = disk.part("a" * 64, 10)
    assert again.resume() == 5
    again.discard()


# --- origins that misbehave -------------------------------------------------------------------------------------------


def test_a_transfer_that_breaks_off_is_resumed(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        node.origins.cut, node.origins.cuts = 10_000, 2
        assert _content(await node.get(hub())) == _FILES
        ranges = [headers.get("range") for headers in node.origins.downloads("model.bin")]
        assert ranges == [None, "bytes=10000-", "bytes=20000-"]

    on_cache(test)


def test_an_interrupted_fetch_is_resumed_by_the_next_agent(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        node.origins.hold = threading.Event()
        task = asyncio.create_task(node.get(hub({"model.bin": _FILES["model.bin"]})))
        await until_async(lambda: any(fetch.done_bytes for fetch in node.cache.report().fetches))
        await _cancel_all(task)
        node.origins.hold = None
        node.restart()
        await node.get(hub({"model.bin": _FILES["model.bin"]}))
        assert [headers.get("range") for headers in node.origins.downloads("model.bin")] == [None, "bytes=1-"]

    on_cache(test)


async def _cancel_all(waiter: asyncio.Task[Any]) -> None:
    """End everything, as the end of an agent does."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert waiter.cancelled()


@pytest.mark.parametrize("how", ["other bytes", "longer", "shorter"])
def test_other_content_than_at_deploy_is_refused(on_cache: Run, how: str) -> None:
    async def test(node: CacheNode) -> None:
        data = _FILES["model.bin"]
        node.origins.served["model.bin"] = {
            "other bytes": b"x" * len(data),
            "longer": data + b"x",
            "shorter": data[:-1],
        }[how]
        with pytest.raises(ArtifactUnavailable, match=r"model\.bin"):
            await node.get(hub())
        assert node.names() == []
        node.origins.served["model.bin"] = data
        with contextlib.suppress(ArtifactUnavailable):  # the first bytes of a file that was shorter are verified again
            await node.get(hub())
        assert _content(await node.get(hub())) == _FILES

    on_cache(test)


def test_a_file_that_is_verified_when_another_fails_is_not_fetched_again(
    on_cache: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(node: CacheNode) -> None:
        finishing, failed = threading.Event(), threading.Event()
        finish = PartFile.finish
        spec = node.put("two", b"whole", b"damaged")

        def finish_late(part: PartFile, digest: str) -> None:
            if digest == sha256(b"damaged"):
                finishing.wait(5)
                failed.set()
                raise WrongContent("it is damaged")
            finishing.set()
            failed.wait(5)
            finish(part, digest)

        with monkeypatch.context() as patch:
            patch.setattr(PartFile, "finish", finish_late)
            with pytest.raises(ArtifactUnavailable, match="damaged"):
                await node.get(spec)
        assert node.files() == [sha256(b"whole")]
        await node.get(spec)
        assert node.read.count(sha256(b"whole")) == 1

    on_cache(test)


@pytest.mark.parametrize(("status", "is_retried"), [(401, False), (403, False), (404, False), (429, True), (503, True)])
def test_an_origin_that_refuses_is_reported(on_cache: Run, status: int, is_retried: bool) -> None:
    async def test(node: CacheNode) -> None:
        node.origins.status = status
        with pytest.raises(ArtifactUnavailable, match=str(status)):
            await node.get(hub({"model.bin": _FILES["model.bin"]}))
        assert len(node.origins.downloads()) == (3 if is_retried else 1)
        assert node.names() == []

    on_cache(test)


def test_an_origin_that_is_away_is_reported(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        node.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
        node.restart()
        with pytest.raises(ArtifactUnavailable):
            await node.get(hub())
        assert (node.names(), node.cache.report().fetches) == ([], ())

    on_cache(test)


def test_an_origin_that_stops_sending_bytes_is_retried_and_reported(
    on_cache: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_fetch, "_STALLED_S", 0.2)

    async def test(node: CacheNode) -> None:
        node.origins.hold = threading.Event()
        try:
            with pytest.raises(ArtifactUnavailable, match=r"model\.bin"):
                await node.get(hub({"model.bin": _FILES["model.bin"]}))
        finally:
            node.origins.hold.set()
        ranges = [headers.get("range") for headers in node.origins.downloads("model.bin")]
        assert ranges == [None, "bytes=1-", "bytes=1-"], "it continued where it had stopped"
        assert node.names() == []

    on_cache(test)


def test_a_safetensors_file_that_was_cut_at_its_origin_is_refused(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        header = json.dumps({"w": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}).encode()
        cut = len(header).to_bytes(8, "little") + header + bytes(8)
        node.origins.served["model.safetensors"] = cut
        spec = hub({"model.safetensors": cut})
        with pytest.raises(ArtifactUnavailable, match="safetensors"):
            await node.get(spec)
        assert (node.names(), node.files()) == ([], [])

    on_cache(test)


def test_a_disk_that_fills_leaves_nothing(on_cache: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(node: CacheNode) -> None:
        other = await node.get(node.put("other", b"other"))

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(PartFile, "add", full)
            with pytest.raises(ArtifactUnavailable, match="disk is full"):
                await node.get(hub())
        assert node.files() == [sha256(b"other")]
        assert other.is_dir()
        assert _content(await node.get(hub())) == _FILES

    on_cache(test)


def test_a_failure_removes_no_files_of_weights_that_start_meanwhile(
    on_cache: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(node: CacheNode) -> None:
        loop, other = asyncio.get_running_loop(), node.put("other", b"other")
        publishing, removed = threading.Event(), threading.Event()
        fetches: list[concurrent.futures.Future[Path]] = []
        remove_unused, add, publish = WeightsDisk.remove_unused, PartFile.add, WeightsDisk.publish

        def add_other(part: PartFile, chunk: bytes) -> None:
            if chunk != b"other":
                raise OSError(errno.ENOSPC, "No space left on device")
            add(part, chunk)

        def remove_after_the_other_started(disk: WeightsDisk, kept: Container[str]) -> int:
            fetches.append(asyncio.run_coroutine_threadsafe(node.get(other), loop))
            publishing.wait(0.2)  # false: it waits until the removal is over
            try:
                return remove_unused(disk, kept)
            finally:
                removed.set()

        def publish_after_the_removal(disk: WeightsDisk, spec: WeightsSpec) -> None:
            publishing.set()
            removed.wait(5)
            publish(disk, spec)

        monkeypatch.setattr(PartFile, "add", add_other)
        monkeypatch.setattr(WeightsDisk, "remove_unused", remove_after_the_other_started)
        monkeypatch.setattr(WeightsDisk, "publish", publish_after_the_removal)
        with pytest.raises(ArtifactUnavailable, match="disk is full"):
            await node.get(node.put("fails", b"fails"))
        assert _content(await asyncio.wrap_future(fetches[0])) == {sha256(b"other")[:8]: b"other"}

    on_cache(test)


@pytest.mark.parametrize("how", ["changed", "cut", "removed"])
def test_a_file_that_a_worker_damaged_is_fetched_again(on_cache: Run, how: str) -> None:
    async def test(node: CacheNode) -> None:
        folder = await node.get(hub())
        path = folder / "model.bin"
        if how == "removed":
            folder.chmod(0o755)
            path.unlink()
        else:
            path.chmod(0o644)
            path.write_bytes(b"x" * (len(_FILES["model.bin"]) if how == "changed" else 3))
        assert _content(await node.get(hub())) == _FILES
        assert len(node.origins.downloads("model.bin")) == (1 if how == "removed" else 2)

    on_cache(test)


def test_weights_that_a_worker_damaged_are_not_complete(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        path = await node.get(hub()) / "model.bin"
        path.chmod(0o644)
        path.write_bytes(b"x")
        node.origins.status = 404
        with pytest.raises(ArtifactUnavailable):
            await node.get(hub())
        assert node.cache.report().complete == ()

    on_cache(test)


# --- room -------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_weights_make_room(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        a, b, c = (node.put(name, name.encode() * 40) for name in "abc")
        for number, spec in enumerate((a, b)):
            os.utime(await node.get(spec), (number, number))
        os.utime(await node.get(a), (2, 2))
        await node.get(c)
        assert node.names() == sorted([a.digest, c.digest])
        assert node.cache.report().evicted_bytes == 40
        assert len(node.files()) == 2

    on_cache(test, limit_bytes=100)


def test_weights_of_a_worker_stay(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        a, b, c = (node.put(name, name.encode() * 40) for name in "abc")
        for number, spec in enumerate((a, b)):
            os.utime(await node.get(spec), (number, number))
        node.in_use = {a.digest}
        await node.get(c)
        assert node.names() == sorted([a.digest, c.digest])
        node.in_use = {a.digest, c.digest}
        with pytest.raises(ArtifactUnavailable, match="GPUFN_WEIGHTS_DISK"):
            await node.get(b)
        node.in_use = None  # unknown
        with pytest.raises(ArtifactUnavailable):
            await node.get(b)
        assert node.names() == sorted([a.digest, c.digest])
        report = node.cache.report()
        assert report.complete == tuple(sorted([a.digest, c.digest]))
        assert report.bytes_per_s is None, "a small fetch has no rate"

    on_cache(test, limit_bytes=100)


def test_weights_stay_if_a_worker_starts_while_room_is_made(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        a, b = (node.put(name, name.encode() * 60) for name in "ab")
        await node.get(a)
        answers: list[set[str]] = [set(), {a.digest}]
        with pytest.raises(ArtifactUnavailable):
            await node.cache.get(b, lambda: answers.pop(0))
        assert node.names() == [a.digest]

    on_cache(test, limit_bytes=100)


def test_weights_above_the_limit_are_refused_before_a_transfer(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        with pytest.raises(ArtifactUnavailable, match="GPUFN_WEIGHTS_DISK"):
            await node.get(node.put("large", b"x" * 101))
        assert node.read == []

    on_cache(test, limit_bytes=100)


def test_two_fetches_share_the_limit(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        specs = [node.put(name, name.encode() * 60) for name in "ab"]
        results = await asyncio.gather(*map(node.get, specs), return_exceptions=True)
        assert [type(result) for result in results].count(ArtifactUnavailable) == 1

    on_cache(test, limit_bytes=100)


def test_a_shared_file_stays_when_other_weights_leave(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        a = node.put("a", b"s" * 40, b"a" * 40)
        os.utime(await node.get(a), (1, 1))
        b = node.put("b", b"s" * 40, b"b" * 40)
        assert sorted(_content(await node.get(b)).values()) == [b"b" * 40, b"s" * 40]
        assert node.read.count(sha256(b"s" * 40)) == 1

    on_cache(test, limit_bytes=100)


def test_files_of_no_weights_make_room_first(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        a = node.put("a", b"a" * 40)
        await node.get(a)
        b = node.put("b", b"b" * 40)
        await node.get(b)
        remove_tree(WeightsDisk(node.root).hide(b.digest))  # its files stay, as after a fetch that failed
        await node.get(node.put("c", b"c" * 40))
        assert a.digest in node.names()
        assert len(node.files()) == 2

    on_cache(test, limit_bytes=100)


def test_prefetches_fetch_each_manifest_once(on_cache: Run) -> None:
    async def test(node: CacheNode) -> None:
        a, b = (node.put(name, name.encode() * 60) for name in "ab")
        kept = {a.digest, b.digest}
        node.cache.prefetch([a, b], lambda: kept)
        await until_async(lambda: len(node.names()) == 1 and not node.cache.report().fetches)
        node.cache.prefetch([a, b], lambda: kept)
        assert (len(node.read), node.cache.report().misses) == (1, 0)

    on_cache(test, limit_bytes=100)


# --- through an agent -------------------------------------------------------------------------------------------------


def test_a_start_waits_for_its_weights_and_the_node_reports_their_progress(on_node: AgentRun) -> None:
    async def test(node: AgentNode) -> None:
        node.weights.may_finish.clear()
        spec = node.weights.put("./weights", b"0123456789")
        await node.deploy(weights=(spec,))
        await node.start()
        worker = await node.assign()
        (fetch,) = await node.until(lambda: [each for each in node.reports[-1].weights.fetches if each.done_bytes])
        assert (fetch.digest, fetch.source, fetch.done_bytes, fetch.total_bytes) == (spec.digest, "./weights", 1, 10)
        node.weights.may_finish.set()
        await node.event(worker, "started")
        config = json.loads((node.home.worker(worker) / "config.json").read_bytes())
        assert config["weights"] == [str(node.home.weights / "folders" / spec.digest)]
        await node.until(lambda: node.reports[-1].weights.stored_bytes == 10 and not node.reports[-1].weights.fetches)

    on_node(test)


def test_a_worker_that_must_stop_does_not_wait_for_its_weights(on_node: AgentRun) -> None:
    async def test(node: AgentNode) -> None:
        node.weights.may_finish.clear()
        await node.deploy(weights=(node.weights.put("./weights", b"0123456789"),))
        await node.start()
        worker = await node.assign()
        await node.until(lambda: node.reports[-1].weights.fetches)
        await node.unassign(worker)
        await node.event(worker, "exited")
        assert node.reports[-1].weights.fetches, "the fetch continues for the next worker"

    on_node(test)


def test_weights_that_cannot_be_fetched_fail_the_start_and_no_other_function(on_node: AgentRun) -> None:
    async def test(node: AgentNode) -> None:
        absent = WeightsSpec(source="./absent", files=(WeightsFile("w", 1, sha256(b"absent")),))
        await node.deploy(weights=(absent,))
        await node.start()
        event = await node.event(await node.assign(), "start_failed")
        assert event.failure is not None
        assert (event.failure.phase, event.failure.error.code) == ("launch", ArtifactUnavailable.code)
        await node.deploy(number=2)
        await node.event(await node.assign(revision=2), "started")

    on_node(test)
