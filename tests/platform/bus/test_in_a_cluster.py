"""Three nats-servers: every message has three replicas, and a node that comes back never shows outdated data."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gpufn_core.errors import BusUnavailable, PlatformError
from gpufn_core.protocol import subjects
from gpufn_platform.bus import jetstream
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.key_value import KeyValue
from tests.e2e.chaos.cluster import Cluster

T = TypeVar("T")
RECORDS = 200
ROUNDS = 3  # of reads after the node has caught up
READERS = 3  # at a time: more keep a busy machine from ever catching up


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def in_time(work: Coroutine[Any, Any, None]) -> None:
    """On a busy machine, electing leaders among three nodes takes longer than other bus tests are allowed to take."""

    async def limited() -> None:
        async with asyncio.timeout(120):
            await work

    asyncio.run(limited())


async def about(bus: Bus, stream: str) -> dict[str, Any]:
    """The response of its leader; no response while there is none."""
    while True:
        try:
            return await bus.js(f"STREAM.INFO.{stream}", timeout_s=1)
        except PlatformError:
            await asyncio.sleep(0.05)


async def at_last(work: Callable[[], Awaitable[T]]) -> T:
    """Requests go unanswered during elections; the platform restarts its processes meanwhile."""
    while True:
        try:
            return await work()
        except BusUnavailable:
            await asyncio.sleep(0.05)


def test_a_stream_is_kept_by_three_nodes_also_while_one_of_them_is_away(cluster: Cluster) -> None:
    in_time(_kept_by_three(cluster))


async def _kept_by_three(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url, name="test")
    early = {"name": subjects.SYNC, **streams.STREAMS[subjects.SYNC], "num_replicas": 1}

    async def ensure() -> None:
        await streams.ensure_stream(bus, subjects.SYNC, streams.STREAMS[subjects.SYNC])

    await at_last(lambda: bus.js(f"STREAM.CREATE.{subjects.SYNC}", early))  # created while the cluster was smaller
    await at_last(ensure)
    while not _all_are_current(info := await about(bus, subjects.SYNC)):
        pass
    cluster.kill(0)
    await about(bus, subjects.SYNC)
    await at_last(ensure)
    again = await about(bus, subjects.SYNC)
    assert [each["config"]["num_replicas"] for each in (info, again)] == [3, 3]
    await bus.close()


def test_two_nodes_are_a_cluster_in_which_one_has_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(tmp_path, nodes=2) as cluster:
        in_time(_kept_by_one(cluster))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("GPUFN_SYNC" in warning and "one replica" in warning for warning in warnings)


async def _kept_by_one(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url, name="test")
    for _ in range(2):
        await at_last(lambda: streams.ensure_stream(bus, subjects.SYNC, streams.STREAMS[subjects.SYNC]))
    assert (await about(bus, subjects.SYNC))["config"]["num_replicas"] == 1
    await bus.close()


def test_a_node_that_comes_back_does_not_show_what_was_before(cluster: Cluster) -> None:
    in_time(_shows_no_past(cluster))


async def _shows_no_past(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url, name="test")
    kv = await at_last(lambda: KeyValue.open(bus, "RECORDS"))
    leader = (await about(bus, kv.stream))["cluster"]["leader"]
    away = next(node for node in cluster.nodes if f"n{node}" != leader)
    cluster.kill(away)
    await about(bus, kv.stream)
    for number in range(RECORDS):
        await at_last(functools.partial(kv.put, f"r{number}", bytes(100_000)))
    cluster.start(away)

    async def read() -> int | None:
        try:
            return len(await kv.entries())
        except PlatformError:  # a missing response is fine
            return None

    seen: set[int | None] = set()
    rounds = 0
    while rounds < ROUNDS:
        has_caught_up = _all_are_current(await about(bus, kv.stream))
        rounds = rounds + 1 if has_caught_up else 0
        seen.update(await asyncio.gather(*(read() for _ in range(READERS))))
    assert seen <= {None, RECORDS}
    assert len(await at_last(kv.entries)) == RECORDS
    await bus.close()


def _all_are_current(info: dict[str, Any]) -> bool:
    replicas = info["cluster"].get("replicas", ())
    return len(replicas) == 2 and all(each["current"] for each in replicas)


def test_a_cluster_without_a_leader_is_away_and_refuses_nothing() -> None:
    answer = b'{"error":{"code":503,"err_code":10008,"description":"JetStream system temporarily unavailable"}}'
    with pytest.raises(BusUnavailable, match="temporarily unavailable"):
        jetstream.read_response(answer, "STREAM.CREATE.T")
