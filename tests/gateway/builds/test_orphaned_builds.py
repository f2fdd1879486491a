"""Why a build waits, on a real bus: its record says when no builder runs for its device."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.devices.engine import Build, BuildState
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_gateway.builds import orphaned_builds
from gpufn_gateway.builds.orphaned_builds import OrphanedBuilds
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue.delivery import Delivery
from gpufn_platform.queue.puller import Pull
from tests.gateway.whole import Whole, gateway_on
from tests.waiting import until_async

MODEL = ModelSpec(parameter="net", files=(ModelFile("net.onnx", "0" * 64, 1),))
WHY = "no builder runs for NVIDIA L4: there is no live node"


class Builder:
    """A builder that takes builds and does not end them."""

    def __init__(self, gateway: Whole, device: str) -> None:
        self._gateway = gateway
        self._device = device
        self.taken: list[Delivery] = []

    async def start(self) -> None:
        self._presence = self._gateway.bus.subscribe(
            subjects.builders(self._device), lambda asked: self._gateway.bus.publish(asked.reply, b"")
        )
        bus, consumer = self._gateway.bus, subjects.build_consumer(self._device)
        queue = subjects.build_queue(self._device)
        await streams.ensure_consumer(bus, subjects.BUILD, consumer, queue, ack_wait_s=30, max_ack_pending=-1)
        self.pull = Pull(bus, subjects.BUILD, consumer, self.taken.append)
        self.pull.grant(1)

    def die(self) -> None:
        """Die while holding the taken builds."""
        self._presence.unsubscribe()
        self.pull.withdraw()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphaned_builds, "SOON_S", 0.0)


def looking(gateway: Whole) -> OrphanedBuilds:
    return OrphanedBuilds(gateway.bus, gateway.builds, gateway.registry, gateway.clock, lambda: True)


async def test_a_build_that_ends_during_the_check_for_its_builder_stays_unchanged(
    nats: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_on(nats) as gateway:
        build = await gateway.builds.begin(MODEL, "NVIDIA L4")
        request = gateway.bus.request

        async def cancelled_meanwhile(subject: str, *arguments: Any, **more: Any) -> Any:
            if subject == subjects.builders("NVIDIA L4"):
                await gateway.builds.cancel(build.id)
            return await request(subject, *arguments, **more)

        monkeypatch.setattr(gateway.bus, "request", cancelled_meanwhile)
        await looking(gateway).step()
        found = gateway.builds.get(build.id)
        assert (found.state, found.detail) == (BuildState.CANCELLED, "cancelled")


async def test_a_build_reports_a_missing_builder_until_one_runs(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        build = await gateway.builds.begin(MODEL, "NVIDIA L4")
        since = gateway.builds.change(build.id)
        await looking(gateway).step()
        told = await gateway.builds.changed(build.id, since, 10)
        assert (told.state, told.detail) == (BuildState.PENDING, WHY)
        since = gateway.builds.change(build.id)
        await looking(gateway).step()
        assert gateway.builds.change(build.id) == since, "once is enough"
        builder = Builder(gateway, "NVIDIA L4")
        await builder.start()
        await until_async(lambda: builder.taken)
        await looking(gateway).step()
        assert gateway.builds.get(build.id).detail == ""
        builder.taken[0].ack()


async def test_a_build_for_a_missing_kind_names_the_present_kinds(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        cpu = Device("cpu", DeviceType.CPU, "cpu", 1 << 30, cores=4)
        gpus = [Device(uuid, DeviceType.GPU, kind, 1 << 30) for uuid, kind in (("1", "Tesla T4"), ("2", "NVIDIA L40"))]
        gateway.registry.receive_node_report(NodeReport("n", gateway.clock.time(), (cpu, *gpus)))
        build = await gateway.builds.begin(MODEL, "RTX 4090")
        since = gateway.builds.change(build.id)
        await looking(gateway).step()
        told = await gateway.builds.changed(build.id, since, 10)
        assert all(kind in told.detail for kind in ("RTX 4090", "NVIDIA L40, Tesla T4", "cpu"))
        gateway.registry.receive_node_report(NodeReport("n", gateway.clock.time(), (cpu,)))
        since = gateway.builds.change(build.id)
        await looking(gateway).step()
        assert gateway.builds.change(build.id) == since, "once is enough"
        await gateway.builds.cancel(build.id)


async def test_how_long_no_builder_answered_is_forgotten_with_the_last_build_for_its_device(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        build, unattended_builds = await gateway.builds.begin(MODEL, "NVIDIA A2"), looking(gateway)
        await unattended_builds.step()
        assert "NVIDIA A2" in unattended_builds._silent_since
        await gateway.builds.cancel(build.id)
        await until_async(lambda: gateway.builds.get(build.id).state is BuildState.CANCELLED)
        await unattended_builds.step()
        assert "NVIDIA A2" not in unattended_builds._silent_since


async def test_a_build_that_waits_behind_another_reports_no_missing_builder(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        builder = Builder(gateway, "cpu")
        await builder.start()
        builds = [await gateway.builds.begin(MODEL, "cpu") for _ in range(2)]
        await until_async(lambda: builder.taken)
        await looking(gateway).step()
        assert [gateway.builds.get(build.id).detail for build in builds] == ["", ""]
        builder.pull.withdraw()
        builder.taken[0].ack()


async def test_a_build_with_a_dead_builder_reports_it_when_no_other_runs(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        builder = Builder(gateway, "NVIDIA L4")
        await builder.start()
        build, behind = [await gateway.builds.begin(MODEL, "NVIDIA L4") for _ in range(2)]
        await until_async(lambda: builder.taken)
        begun = msgspec.structs.replace(build, state=BuildState.BUILDING, detail="node 7 of 9")
        await gateway.buckets.builds.put(build.id, encode(begun))
        await until_async(lambda: gateway.builds.get(build.id) == begun)
        await looking(gateway).step()
        assert [gateway.builds.get(each.id).detail for each in (build, behind)] == ["node 7 of 9", ""]
        builder.die()
        await gateway.bus.flush()
        await looking(gateway).step()
        states = [(gateway.builds.get(each.id).state, gateway.builds.get(each.id).detail) for each in (build, behind)]
        assert states == [(BuildState.BUILDING, WHY), (BuildState.PENDING, WHY)]
        builder.taken[0].ack()


async def test_a_builder_that_is_away_for_a_moment_is_not_missed(nats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphaned_builds, "SOON_S", 60.0)
    async with gateway_on(nats) as gateway:
        build = await gateway.builds.begin(MODEL, "NVIDIA A30")
        gateway.builds.known[build.id] = msgspec.structs.replace(build, created_at=0.0)
        await looking(gateway).step()
        assert gateway.builds.get(build.id).detail == ""


async def test_a_build_that_is_begun_meanwhile_is_left_as_it_is(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        build = await gateway.builds.begin(MODEL, "NVIDIA T4")
        known = gateway.builds.known[build.id]
        await gateway.builds.cancel(build.id)
        gateway.builds.known[build.id] = known  # the state that the watch last reported
        gateway.builds._changed_at[build.id] -= 1
        await looking(gateway).step()
        entry = await gateway.buckets.builds.get(build.id)
        assert entry is not None
        assert b"no builder runs" not in entry.value


async def test_a_build_that_has_just_been_queued_is_not_looked_at(nats: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphaned_builds, "SOON_S", 60.0)
    async with gateway_on(nats) as gateway:
        build: Build = await gateway.builds.begin(MODEL, "NVIDIA A10")
        await looking(gateway).step()
        assert gateway.builds.get(build.id).detail == ""


async def test_a_build_whose_gateway_died_before_it_was_queued_is_queued(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        other = await gateway.builds.begin(MODEL, "NVIDIA L40")
        lost = msgspec.structs.replace(other, id=new_ulid())
        await gateway.buckets.builds.create(lost.id, encode(lost))
        await until_async(lambda: lost.id in gateway.builds.known)
        for _ in range(2):
            await looking(gateway).step()
        builder = Builder(gateway, "NVIDIA L40")
        await builder.start()
        builder.pull.grant(9)
        await until_async(lambda: len(builder.taken) == 2)
        assert [each.payload.decode() for each in builder.taken] == [other.id, lost.id]
        assert builder.taken[-1].pending == 0
        for each in builder.taken:
            each.ack()
