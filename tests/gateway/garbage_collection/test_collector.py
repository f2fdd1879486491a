"""The garbage collector on a real bus. The rules are tested as tables in test_rules.py."""

from __future__ import annotations

import asyncio
import io
import itertools
import time
import zipfile
from typing import Any

import pytest

from gpufn_core.domain.devices.engine import BuildState
from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.errors import BusUnavailable, RevisionNotFound
from gpufn_core.ids import digest_of
from gpufn_core.protocol import subjects
from gpufn_core.spec.priority import QUEUES
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.garbage_collection import collector
from gpufn_gateway.garbage_collection.collector import GarbageCollector
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.queue import queue_position
from gpufn_platform.queue.call_request import CallRequest
from tests import blobs
from tests.gateway.builds.test_builds import NET, ONNX, built, deploy, model, upload
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async

HOUR_S = 3600.0


class Ahead:
    """A clock that runs ahead, for a later collection."""

    def __init__(self) -> None:
        self.by_s = 0.0

    def time(self) -> float:
        return time.time() + self.by_s

    def monotonic(self) -> float:
        return time.monotonic() + self.by_s


class Collected:
    def __init__(self, gateway: Whole) -> None:
        self.clock = Ahead()
        self.in_use: set[tuple[str, int]] | None = set()
        self.trouble: Exception | None = None
        self.was_asked = asyncio.Event()
        self.collection = GarbageCollector(
            bus=gateway.bus,
            buckets=gateway.buckets,
            registry=gateway.registry,
            builds=gateway.builds,
            volumes=gateway.volumes,
            in_use=self._known,
            kept_revisions=2,
            clock=self.clock,
        )

    def _known(self) -> set[tuple[str, int]] | None:
        self.was_asked.set()
        if self.trouble is not None:
            raise self.trouble
        return self.in_use

    async def after(self, seconds: float) -> None:
        self.clock.by_s += seconds
        await self.collection.step()


async def upload_bundle(gateway: Whole, text: str) -> str:
    """Upload a bundle that no other test's function names, and return its digest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("app.py"), text)  # a fixed date: the same bytes each time
    data = buffer.getvalue()
    await gateway.deploys.put_bundle(digest_of(data), data)
    return digest_of(data)


async def stored_numbers(gateway: Whole, name: str) -> list[int]:
    return sorted(int(key.rpartition(".")[2]) for key in await gateway.revisions.keys(f"{name}."))


async def consumers(gateway: Whole, stream: str) -> list[str]:
    return (await gateway.bus.js(f"CONSUMER.NAMES.{stream}"))["consumers"] or []


async def test_old_revisions_are_retired_then_deleted_with_their_consumers(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        collected = Collected(gateway)
        for number in range(4):
            gateway.report(make.status("many", number, ready=0))  # so that `serving` moves at once
            await gateway.deploys.deploy(make.spec("many"), DIGEST, DeployOptions(check=False))
        for kind, number in itertools.product(QUEUES, (1, 4)):
            queue = queue_position.address("many", number, kind)
            await streams.ensure_consumer(gateway.bus, *queue, ack_wait_s=9, max_ack_pending=9)
        collected.in_use = {("many", 2)}
        await collected.after(0)
        assert await stored_numbers(gateway, "many") == [1, 2, 3, 4]
        with pytest.raises(RevisionNotFound):
            await gateway.deploys.rollback("many", 1)
        await collected.after(61)
        assert await stored_numbers(gateway, "many") == gateway.registry.numbers("many") == [2, 3, 4]
        assert sorted(await consumers(gateway, subjects.SYNC)) == ["S-many-4-hi", "S-many-4-low", "S-many-4-normal"]
        assert sorted(await consumers(gateway, subjects.ASYNC)) == ["A-many-4-hi", "A-many-4-low", "A-many-4-normal"]
        assert (await gateway.deploys.rollback("many", 2)).active == 2
        assert (await gateway.deploys.deploy(make.spec("many"), DIGEST)).active == 5


async def test_a_revision_deleted_during_a_collection_does_not_stop_the_pass(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_on(nats) as gateway:
        collected = Collected(gateway)
        for _ in range(4):
            await gateway.deploys.deploy(make.spec("vanishing"), DIGEST)
        await gateway.deploys.delete("vanishing")
        delete = gateway.revisions.delete

        async def deleted_by_two(key: str, revision: int | None = None) -> None:
            await delete(key, revision)
            gateway.registry.revisions.pop("vanishing", None)  # another collector deleted it, and the watch restarted

        monkeypatch.setattr(gateway.revisions, "delete", deleted_by_two)
        await collected.after(0)
        assert await stored_numbers(gateway, "vanishing") == [4]


async def test_a_function_that_is_deployed_again_continues_its_numbers(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        collected = Collected(gateway)
        for _ in range(3):
            await gateway.deploys.deploy(make.spec("again"), DIGEST)
        await gateway.deploys.delete("again")
        collected.in_use = {("again", 1)}  # a running call
        await collected.after(0)
        assert await stored_numbers(gateway, "again") == [1, 3]
        collected.in_use = set()
        await collected.after(0)
        assert await stored_numbers(gateway, "again") == gateway.registry.numbers("again") == [3]
        assert gateway.registry.revision("again", 3).bundle == ""
        assert (await gateway.deploys.deploy(make.spec("again"), DIGEST)).active == 4
        with pytest.raises(RevisionNotFound):
            await gateway.deploys.rollback("again", 3)
        await collected.after(61)
        assert await stored_numbers(gateway, "again") == [4]


async def test_a_deletion_is_followed_by_a_pass_and_a_pass_that_fails_by_another(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_AFTER_A_DELETE_S", 0.0)
    async with gateway_on(nats) as gateway:
        collected = Collected(gateway)
        gateway.registry.on_deleted.append(collected.collection.on_deleted)
        for name in ("fails", "works"):
            await gateway.deploys.deploy(make.spec(name), DIGEST)
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        collected.trouble = BusUnavailable("not now")
        running = asyncio.create_task(collected.collection.run())
        await gateway.deploys.delete("fails")
        await collected.was_asked.wait()
        collected.trouble = None
        await gateway.deploys.delete("works")
        await until_async(lambda: (gateway.registry.numbers("fails"), gateway.registry.numbers("works")) == ([2], [2]))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_records_of_calls_that_outlive_their_function_are_collected_soon_after_their_end(
    nats: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_AFTER_A_DELETE_S", 0.01)
    async with gateway_on(nats) as gateway:
        collected = Collected(gateway)
        gateway.registry.on_deleted.append(collected.collection.on_deleted)
        for _ in range(3):
            await gateway.deploys.deploy(make.spec("slow-to-end"), DIGEST)
        collected.in_use = {("slow-to-end", 2)}
        running = asyncio.create_task(collected.collection.run())
        await gateway.deploys.delete("slow-to-end")
        await until_async(lambda: gateway.registry.numbers("slow-to-end") == [2, 3])
        collected.in_use = set()
        await until_async(lambda: gateway.registry.numbers("slow-to-end") == [3])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_nothing_is_collected_while_running_work_is_unknown(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        collected = Collected(gateway)
        await gateway.deploys.deploy(make.spec("runs"), DIGEST)
        await gateway.deploys.deploy(make.spec("runs"), DIGEST)
        await gateway.deploys.delete("runs")
        collected.in_use = None
        await collected.after(2 * HOUR_S)
        assert await stored_numbers(gateway, "runs") == [1, 2]


async def test_the_stored_records_count_and_not_the_state_from_watches(nats: Any, make: Any) -> None:
    """The watches are silent from before the deploy."""
    async with gateway_on(nats) as gateway:
        collected = Collected(gateway)
        digest = await upload_bundle(gateway, "late")
        await gateway.deploys.deploy(make.spec("late"), digest)
        del gateway.registry.functions["late"]
        await collected.after(2 * HOUR_S)
        assert gateway.registry.revision("late", 1).state == "ready"
        del gateway.registry.revisions["late"]
        await collected.after(0)
        assert await blobs.exists(gateway.bus, subjects.BUNDLES, digest)


async def test_bundles_go_an_hour_after_the_last_that_named_them_was_deployed(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        collected = Collected(gateway)
        digest = await upload_bundle(gateway, "brief")
        await gateway.deploys.deploy(make.spec("brief"), digest)
        await gateway.deploys.delete("brief")
        await collected.after(HOUR_S - 60)
        assert await blobs.exists(gateway.bus, subjects.BUNDLES, digest)
        await collected.after(120)
        assert not await blobs.exists(gateway.bus, subjects.BUNDLES, digest)
        await upload_bundle(gateway, "brief")
        assert (await gateway.deploys.deploy(make.spec("brief"), digest)).active == 2
        await collected.after(HOUR_S)
        assert await blobs.exists(gateway.bus, subjects.BUNDLES, digest)


async def test_model_files_builds_and_reports_go_when_nothing_names_them(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        collected = Collected(gateway)
        await deploy(gateway, model("kept"))
        (build_id,) = gateway.registry.revision("kept", 1).builds
        report = await object_store.put(gateway.bus, subjects.ENGINE_FILES, b"a report")
        await built(gateway, build_id, report=report, ended_at=time.time())
        await gateway.finishing.step()
        await upload(gateway, b"samples that nobody came back for")
        unnamed = digest_of(b"samples that nobody came back for")
        await collected.after(2 * HOUR_S)
        assert not await blobs.exists(gateway.bus, subjects.MODEL_FILES, unnamed)
        assert await object_store.get(gateway.bus, subjects.MODEL_FILES, digest_of(ONNX)) == ONNX
        assert await blobs.exists(gateway.bus, subjects.ENGINE_FILES, report)

        running = await gateway.builds.begin(NET, "cpu")
        await gateway.deploys.delete("kept")
        await collected.after(8 * 24 * HOUR_S)
        assert list(gateway.builds.known) == [running.id]
        assert await gateway.buckets.builds.keys() == [running.id]
        assert not await blobs.exists(gateway.bus, subjects.ENGINE_FILES, report)
        assert await blobs.exists(gateway.bus, subjects.MODEL_FILES, digest_of(ONNX))

        await built(gateway, running.id, BuildState.FAILED, ended_at=time.time())
        await collected.after(0)
        assert not await blobs.exists(gateway.bus, subjects.MODEL_FILES, digest_of(ONNX))


async def test_calls_whose_gateway_died_end_when_they_are_past_their_deadline(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        collected = Collected(gateway)
        await gateway.deploys.deploy(make.spec("stuck"), DIGEST)
        revision = gateway.registry.revision("stuck", 1)
        queue = subjects.sync_queue("stuck", 1)
        calls = [
            gateway.caller.invoke(
                CallRequest(
                    revision=revision, method="", content_type="", accept="", body=b"", deadline=time.time() + s
                )
            )
            for s in (10, 20, 500, 10)
        ]
        await gateway.bus.flush()
        await collected.after(75)
        assert (await streams.messages_per_subject(gateway.bus, subjects.SYNC))[queue] == 2
        await collected.after(10)
        assert (await streams.messages_per_subject(gateway.bus, subjects.SYNC))[queue] == 1
        for call in (calls[0], calls[1], calls[3]):
            reply, _ = await call.future
            assert (reply.kind, reply.error and reply.error.code) == (OutcomeKind.EXPIRED, "invocation_expired")
        assert not calls[2].future.done()
        for call in calls:
            call.cancel()
