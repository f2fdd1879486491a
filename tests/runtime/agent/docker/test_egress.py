"""A container with gVisor's stand-in and network="egress", on a node and an internet of network namespaces."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.conftest import Platform
from tests.network_lab import ALLOWED, GATEWAY, METADATA, NODE, PORT, PRIVATE, PUBLIC, Lab, connects, living_in, within
from tests.runtime.agent.docker.conftest import APPS, Daemon, platform_with
from tests.waiting import until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def outward(daemon: Daemon, lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    others = set(daemon.images())
    with (
        living_in(lab.node),
        platform_with(daemon, tmp_path_factory.mktemp("home"), GPUFN_EGRESS_ALLOW=f"{ALLOWED}/32") as platform,
    ):
        platform.gpufn("deploy", APPS / "outward.py")
        yield platform
    if made := set(daemon.images()) - others:
        daemon.docker("rmi", *made)


def test_a_container_reaches_the_internet_and_nothing_else(outward: Platform, daemon: Daemon, lab: Lab) -> None:
    docker = daemon.docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")[0]
    refused = (PRIVATE, METADATA, GATEWAY, NODE, docker)
    with lab.server(lab.node):
        outcomes = outward.invoke("reach", {"targets": [(each, PORT) for each in (PUBLIC, ALLOWED, *refused)]})
    assert outcomes[:2] == ["", ""]
    assert "" not in outcomes[2:]


def test_it_runs_with_the_runtime_of_gvisor(outward: Platform, daemon: Daemon, lab: Lab) -> None:
    outward.invoke("reach", {"targets": []})
    runtimes = daemon.docker("inspect", "--format", "{{.HostConfig.Runtime}}", *daemon.awake())
    assert set(runtimes) == {"runsc"}


def test_containers_of_the_network_do_not_reach_each_other(outward: Platform, daemon: Daemon, lab: Lab) -> None:
    [network] = daemon.docker("network", "ls", "--filter", "label=gpufn.owner", "--format", "{{.Name}}")
    server = "import socket; s = socket.create_server(('', 80)); x = [s.accept() for _ in iter(int, 1)]"
    [first] = daemon.docker("run", "-d", f"--network={network}", "gpufn-test-base", "python3", "-c", server)
    try:
        networks = json.loads(daemon.docker("inspect", "--format", "{{json .NetworkSettings.Networks}}", first)[0])
        address = networks[network]["IPAddress"]
        until(lambda: within(lab.node, lambda: connects(address, 80)) == "", "the server to listen")
        client = f"import socket; socket.create_connection(({address!r}, 80), 1)"
        command = ["docker", f"--host={daemon.host}", "run", "--rm", f"--network={network}", "gpufn-test-base"]
        ended = subprocess.run([*command, "python3", "-c", client], capture_output=True, text=True, check=False)
        assert any(name in ended.stderr for name in ("ConnectionRefusedError", "TimeoutError"))
    finally:
        daemon.remove(first)
