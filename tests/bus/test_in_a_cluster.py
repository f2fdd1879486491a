"""Three nats-servers: what is stored is stored three times, and a node that comes back shows nobody the past."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from gpufn.bus import jetstream, streams
from gpufn.bus.connection import Bus
from gpufn.bus.kv import KeyValue
from gpufn.errors import BusUnavailable, PlatformError
from gpufn.protocol import subjects
from tests.e2e.chaos.cluster import Cluster

RECORDS = 200


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


async def about(bus: Bus, stream: str) -> dict[str, Any]:
    """What its leader says; while there is none, nobody does."""
    while True:
        try:
            return await bus.js(f"STREAM.INFO.{stream}", timeout_s=1)
        except PlatformError:
            await asyncio.sleep(0.05)


async def test_each_stream_is_kept_by_three_nodes_also_while_one_of_them_is_away(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url, name="test")
    kv = await KeyValue.open(bus, "RECORDS")
    await streams.ensure_streams(bus)
    names = (*streams.STREAMS, kv.stream)
    assert {(await about(bus, name))["config"]["num_replicas"] for name in names} == {3}
    cluster.kill(0)
    for name in names:
        await about(bus, name)
    await streams.ensure_streams(bus)
    assert {(await about(bus, name))["config"]["num_replicas"] for name in names} == {3}
    await bus.close()


async def test_two_nodes_are_a_cluster_in_which_one_has_it(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(tmp_path, nodes=2) as cluster:
        bus = await Bus.connect(cluster.url, name="test")
        for _ in range(2):
            await streams.ensure_stream(bus, subjects.SYNC, streams.STREAMS[subjects.SYNC])
        assert (await about(bus, subjects.SYNC))["config"]["num_replicas"] == 1
        await bus.close()
    assert "GPUFN_SYNC is kept by one node of the bus's cluster only" in caplog.text


async def test_a_node_that_comes_back_does_not_show_what_was_before(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url, name="test")
    kv = await KeyValue.open(bus, "RECORDS")
    leader = (await about(bus, kv.stream))["cluster"]["leader"]
    away = next(node for node in cluster.nodes if f"n{node}" != leader)
    cluster.kill(away)
    await about(bus, kv.stream)
    for number in range(RECORDS):
        await kv.put(f"r{number}", bytes(100_000))
    cluster.start(away)

    async def read() -> int | None:
        try:
            return len(await kv.entries())
        except PlatformError:  # no answer is an answer
            return None

    seen: set[int | None] = set()
    is_current = False
    while not is_current:
        is_current = _is_current(await about(bus, kv.stream), away)
        seen.update(await asyncio.gather(*(read() for _ in range(8))))
    assert seen - {None} == {RECORDS}
    await bus.close()


def _is_current(info: dict[str, Any], node: int) -> bool:
    return any(each["name"] == f"n{node}" and each["current"] for each in info["cluster"]["replicas"])


def test_a_cluster_without_a_leader_is_away_and_refuses_nothing() -> None:
    answer = b'{"error":{"code":503,"err_code":10008,"description":"JetStream system temporarily unavailable"}}'
    with pytest.raises(BusUnavailable, match="temporarily unavailable"):
        jetstream.read_answer(answer, "STREAM.CREATE.T")
