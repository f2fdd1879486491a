"""Three nats-servers: every message has three replicas, and a node that comes back never shows outdated data."""

from __future__ import annotations

import asyncio
import functools
import re
import shutil
import socket
import subprocess
import textwrap
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
from gpufn_platform.bus.tls import BusTls
from tests.conftest import ROOT, missing
from tests.e2e.chaos.cluster import Cluster

T = TypeVar("T")
RECORDS = 200
ROUNDS = 3  # of reads after the node has caught up
EARLY_ROUNDS = 20  # of reads before: a busy machine that reads on and on never catches up
PAUSE_S = 0.05  # between requests: without it they keep a busy machine from replicating, once for two minutes
READERS = 3


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class Documented(Cluster):
    """The servers of docs/operations.md, with its commands and its configuration as they are written there. Only names,
    addresses, ports, folders and users are others."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        text = (ROOT / "docs" / "operations.md").read_text().partition("## NATS servers of your own")[2]
        make_authority, self._make_certificate = re.split(r"\n(?= *openssl)", _fenced(text, "```sh\n", "openssl"))
        self._text = _fenced(text, "```\n", "server_name")
        _shell(make_authority, folder)

    @property
    def url(self) -> str:
        hosts = enumerate(self._clients, 1)
        return ",".join(f"tls://admin:of-a-test@127.0.0.{node}:{port}" for node, port in hosts)

    @property
    def tls(self) -> BusTls:
        return BusTls(ca_file=str(self._folder / "ca.pem"))

    def config(self, node: int, folder: Path) -> str:
        for name in ("ca.pem", "ca.key"):
            shutil.copy(self._folder / name, folder)
        _shell(self._make_certificate.replace("10.0.0.1", f"127.0.0.{node + 1}"), folder)
        text = self._text.replace("server_name: n1", f"server_name: n{node}")
        text = text.replace('listen: "10.0.0.1:', f'listen: "10.0.0.{node + 1}:')
        for number, (client, route) in enumerate(zip(self._clients, self._routes, strict=True), 1):
            text = text.replace(f"10.0.0.{number}:4222", f"127.0.0.{number}:{client}")
            text = text.replace(f"10.0.0.{number}:6222", f"127.0.0.{number}:{route}")
        text = text.replace("/etc/nats", str(folder)).replace("/var/lib/nats", str(folder))
        return text.replace("[ … ]", "[{ user: admin, password: of-a-test }]")


def _fenced(text: str, fence: str, word: str) -> str:
    """The first block with `word` behind `fence`."""
    blocks = [block.partition("```")[0] for block in text.split(fence)[1:]]
    return textwrap.dedent(" " * 4 + next(block for block in blocks if word in block).strip())


def _shell(command: str, folder: Path) -> None:
    if shutil.which("openssl") is None:
        missing("openssl is not installed")
    subprocess.run(["sh", "-ec", command], cwd=folder, check=True, capture_output=True)


def test_the_documented_servers_speak_tls_with_clients_and_with_each_other(tmp_path: Path) -> None:
    with Documented(tmp_path) as cluster:
        context = cluster.tls.context([])
        assert context is not None
        for node, port in enumerate(cluster._routes, 1):
            with socket.create_connection((f"127.0.0.{node}", port), timeout=10) as plain:
                context.wrap_socket(plain, server_hostname=f"127.0.0.{node}").close()
        in_time(_kept_by_three_over_tls(cluster))


async def _kept_by_three_over_tls(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url, name="test", tls=cluster.tls)
    await at_last(lambda: bus.js("STREAM.CREATE.S", {"name": "S", "subjects": ["s"], "num_replicas": 3}))
    await _current(bus, "S")
    urls = bus.server_info.get("connect_urls")
    assert urls is not None
    cluster.kill(int(str(bus.server_info["server_name"]).removeprefix("n")))
    await at_last(lambda: bus.publish_stored("s", b"x", msg_id="1"))  # by another server
    await bus.close()


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
            await asyncio.sleep(PAUSE_S)


async def _current(bus: Bus, stream: str) -> dict[str, Any]:
    """Wait until all replicas are current, and return the response of the leader."""
    while True:
        info = await about(bus, stream)
        if _all_are_current(info):
            return info
        await asyncio.sleep(PAUSE_S)


async def at_last(work: Callable[[], Awaitable[T]]) -> T:
    """Requests go unanswered during elections; the platform restarts its processes meanwhile."""
    while True:
        try:
            return await work()
        except BusUnavailable:
            await asyncio.sleep(PAUSE_S)


def test_a_stream_is_kept_by_three_nodes_also_while_one_of_them_is_away(cluster: Cluster) -> None:
    in_time(_kept_by_three(cluster))


async def _kept_by_three(cluster: Cluster) -> None:
    bus = await Bus.connect(cluster.url, name="test")
    early = {"name": subjects.SYNC, **streams.STREAMS[subjects.SYNC], "num_replicas": 1}

    async def ensure() -> None:
        await streams.ensure_stream(bus, subjects.SYNC, streams.STREAMS[subjects.SYNC])

    await at_last(lambda: bus.js(f"STREAM.CREATE.{subjects.SYNC}", early))  # created while the cluster was smaller
    await at_last(ensure)
    info = await _current(bus, subjects.SYNC)
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


def test_a_node_that_returns_does_not_show_old_values(cluster: Cluster) -> None:
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
    early = rounds = 0
    while rounds < ROUNDS:
        await asyncio.sleep(PAUSE_S)
        has_caught_up = _all_are_current(await about(bus, kv.stream))
        rounds = rounds + 1 if has_caught_up else 0
        early += not has_caught_up
        if has_caught_up or early <= EARLY_ROUNDS:
            seen.update(await asyncio.gather(*(read() for _ in range(READERS))))
        else:  # an idle stream has reported such a node as behind for two minutes
            await at_last(functools.partial(kv.put, "r0", b""))
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
