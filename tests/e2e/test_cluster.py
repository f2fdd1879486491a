"""A bus of three nats-servers: each stream has three replicas, and the platform keeps running when a node dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufn_core.protocol import subjects
from gpufn_gateway.monitoring.dashboards import Needs
from tests.conftest import Platform, running_platform
from tests.e2e.chaos.cluster import Cluster, about, behind, leader
from tests.e2e.chaos.verdict import eventually
from tests.e2e.prometheus import Prometheus, queries
from tests.e2e.test_durable import Submitters, wait_for
from tests.e2e.test_survival import Load
from tests.waiting import until

pytestmark = pytest.mark.e2e

APPS = Path(__file__).parent / "apps"
# An election takes about five seconds, and clients of the dead node have to detect the loss and reconnect.
WHOLE_AGAIN_S = 90.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("nats")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("clustered") / "home", "--nats", cluster.url) as platform:
        platform.gpufn("deploy", APPS / "steady.py")
        platform.gpufn("deploy", APPS / "durable.py")
        assert platform.invoke("steady", {"number": 1}) == 1
        yield platform


def leads(cluster: Cluster, stream: str) -> int:
    """Wait until a node leads the stream, and return it."""
    found: list[int] = []

    def look() -> bool:
        found.append(leader(cluster, stream))
        return False

    eventually(look, f"no node leads {stream}", WHOLE_AGAIN_S)
    return found[-1]


def test_every_stream_of_the_platform_has_three_replicas(own: Platform, cluster: Cluster) -> None:
    replicas = {name: info["config"]["num_replicas"] for name, info in about(cluster).items()}
    assert {subjects.SYNC, subjects.ASYNC, subjects.RESULTS, f"KV_{subjects.FUNCTIONS}"} <= replicas.keys()
    assert set(replicas.values()) == {3}


def test_the_dashboards_show_the_lag_of_the_replicas(own: Platform, tmp_path: Path) -> None:
    with Prometheus(tmp_path, [str(own.client.base_url)]) as prometheus:
        expected = queries(Needs.CLUSTER)
        assert expected
        until(lambda: not prometheus.without_data(expected), lambda: prometheus.without_data(expected))


@pytest.mark.parametrize("stream", [subjects.ASYNC, subjects.SYNC])
def test_the_leader_of_a_stream_dies_and_returns_and_no_call_is_lost(
    own: Platform, cluster: Cluster, tmp_path: Path, stream: str
) -> None:
    """Covers waiting calls, submitted calls, and calls that a client repeats until they are accepted."""
    path = tmp_path / "runs"
    with Load(own) as load, Submitters(own, path) as submitters:
        load.wait_for_answers(20, WHOLE_AGAIN_S)
        node = leads(cluster, stream)
        cluster.kill(node)
        eventually(lambda: leader(cluster, stream) == node, "there is no other leader")
        load.wait_for_answers(25, WHOLE_AGAIN_S)
        submitters.wait_for(20)
        cluster.start(node)
        eventually(lambda: behind(cluster), "a replica is behind")
        load.wait_for_answers(25, WHOLE_AGAIN_S)
        load.stop()
    assert load.wrong + submitters.wrong == []
    for invocation, number in {**load.accepted, **submitters.accepted}.items():
        answer = wait_for(own, invocation)
        assert (answer.status_code, answer.json()) == (200, number), answer.text
    assert set(map(int, path.read_text().splitlines())) == set(submitters.accepted.values())


def test_a_platform_that_starts_while_a_node_is_away_finds_everything(
    own: Platform, cluster: Cluster, tmp_path: Path
) -> None:
    node = leads(cluster, f"KV_{subjects.FUNCTIONS}")
    cluster.kill(node)
    try:
        eventually(lambda: not about(cluster), "an election is not over")
        with running_platform(tmp_path / "home", "--nats", cluster.url, environ={"GPUFN_NODE": "late"}) as platform:
            assert platform.invoke("steady", {"number": 5}) == 5
    finally:
        cluster.start(node)
