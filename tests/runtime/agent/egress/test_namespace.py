"""The namespace of workers with network="egress", against a node and an internet of network namespaces."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.home import Home
from gpufn_core.protocol.launch import NetworkNamespace
from gpufn_runtime.agent.egress import availability, resolver
from gpufn_runtime.agent.egress.namespace import EgressNamespace
from gpufn_runtime.agent.launchers.base import NodeFault
from tests.conftest import missing
from tests.network_lab import (
    ALLOWED,
    GATEWAY,
    METADATA,
    NODE,
    OTHER_REFUSED,
    PORT,
    PRIVATE,
    PUBLIC,
    RESOLVER,
    Lab,
    connects,
    living_in,
    network_lab,
    within,
)

REFUSED = "PermissionError"
ON_LOOPBACK = "127.0.0.99"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with network_lab() as lab:
        yield lab


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"))
    home.ensure()
    return home


@pytest.fixture(scope="module")
def egress(lab: Lab, home: Home) -> Iterator[tuple[EgressNamespace, NetworkNamespace]]:
    egress = EgressNamespace(home, [ipaddress.ip_network("10.1.0.0/16")], trouble="")
    with pytest.MonkeyPatch.context() as patch, living_in(lab.node):
        patch.setattr(availability, "current_dns", lambda: resolver.read(f"nameserver {RESOLVER}"))
        joined = egress._set_up()
        yield egress, joined
        egress._tear_down()


@pytest.fixture
def worker(egress: tuple[EgressNamespace, NetworkNamespace]) -> Callable[[Callable[[], Any]], Any]:
    """Run something where a worker runs."""
    return lambda work: within(egress[1].path, work)


@pytest.mark.parametrize("address", [PUBLIC, ALLOWED])
def test_a_worker_reaches_the_internet_and_the_allowed_addresses(worker: Any, address: str) -> None:
    assert worker(lambda: connects(address)) == ""


@pytest.mark.parametrize("address", [PRIVATE, METADATA, GATEWAY, NODE, *OTHER_REFUSED])
def test_a_worker_reaches_no_private_network_no_metadata_and_not_the_node(lab: Lab, worker: Any, address: str) -> None:
    with lab.server(lab.node):
        assert within(lab.node, lambda: connects(address)) == ""
        assert worker(lambda: connects(address)) == REFUSED


def test_a_worker_reaches_the_resolver_at_its_port_only(worker: Any) -> None:
    assert worker(lambda: _lookup(RESOLVER)) == PUBLIC
    assert worker(lambda: connects(RESOLVER)) != ""


def test_each_of_the_two_sets_of_rules_is_enough(lab: Lab, egress: Any, worker: Any) -> None:
    def ip(command: str) -> None:
        subprocess.run(["ip", "-netns", egress[0]._name, *command.split()], check=True)

    others = (PRIVATE, METADATA, GATEWAY, NODE, *OTHER_REFUSED)
    for command in ("rule flush", "rule add pref 1 lookup local", "rule add pref 2 lookup main"):
        ip(command)
    with lab.server(lab.node):
        assert {worker(functools.partial(connects, each)) for each in others} == {"ConnectionRefusedError"}
        egress[0]._set_up()
        subprocess.run(["nft", "flush", "ruleset"], check=True)
        assert {worker(functools.partial(connects, each)) for each in others} == {REFUSED}
    egress[0]._set_up()
    assert worker(lambda: connects(PUBLIC)) == ""


def test_workers_reach_neither_each_other_nor_loopback(worker: Any, egress: Any) -> None:
    server = worker(lambda: socket.create_server(("", PORT)))
    own = worker(lambda: _own_address(PUBLIC))
    with server:
        for address in (own, "127.0.0.1", "::1", "255.255.255.255"):
            assert worker(functools.partial(connects, address, within_s=0.2)) != ""
        assert connects(own, within_s=0.2) != ""  # no process connects to a worker


def test_the_next_agent_finds_the_namespace_and_applies_its_own_rules(
    lab: Lab, home: Home, egress: Any, worker: Any
) -> None:
    before = egress[1].inode
    assert EgressNamespace(home, trouble="")._set_up().inode == before
    assert worker(lambda: connects(ALLOWED)) != ""
    assert egress[0]._set_up().inode == before
    assert worker(lambda: connects(ALLOWED)) == ""


def test_a_resolver_on_a_loopback_address_is_reached_by_the_gateway(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(availability, "current_dns", lambda: resolver.read(f"nameserver {ON_LOOPBACK}"))
    (own := Home(tmp_path)).ensure()
    egress = EgressNamespace(own, trouble="")
    (Path("/run/netns") / egress._name).touch()  # the file of a namespace whose mount is gone
    with living_in(lab.node), lab.resolver(lab.node, ON_LOOPBACK):
        joined = egress._set_up()
        try:
            gateway = Path(joined.own_resolv_conf).read_text().split()[1]
            assert within(joined.path, lambda: _lookup(gateway)) == PUBLIC
            assert within(joined.path, lambda: connects(gateway)) != ""
        finally:
            egress._tear_down()
        listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
        assert egress._interface not in listed
        assert not Path(joined.path).exists()


def test_packets_pass_docker_although_it_drops_unknown_ones(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("iptables") is None:
        missing("the program iptables")
    (own := Home(tmp_path)).ensure()
    egress = EgressNamespace(own, trouble="")
    with living_in(lab.node):
        for rule in ("--policy FORWARD DROP", "--new-chain DOCKER-USER", "--append FORWARD --jump DOCKER-USER"):
            subprocess.run(["iptables", *rule.split()], check=True)
        joined = egress._set_up()
        try:
            assert [within(joined.path, functools.partial(connects, each)) for each in (PUBLIC, PRIVATE)] == [
                "",
                REFUSED,
            ]
        finally:
            egress._tear_down()
        rules = subprocess.run(["iptables", "--list-rules", "DOCKER-USER"], capture_output=True, text=True, check=True)
        assert egress._interface not in rules.stdout
        subprocess.run(["iptables", "--policy", "FORWARD", "ACCEPT"], check=True)


def test_a_set_up_that_fails_is_reported_and_leaves_nothing(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    egress = EgressNamespace(Home(tmp_path), trouble="", report=reported.append)
    monkeypatch.setattr(egress, "_pass_docker", lambda: subprocess.run(["false"], check=True))
    with living_in(lab.node), pytest.raises(NodeFault):
        asyncio.run(egress.ready())
    assert len(reported) == 1
    assert not (Path("/run/netns") / egress._name).exists()


def test_a_node_that_cannot_have_a_namespace_reports_it(tmp_path: Path) -> None:
    with pytest.raises(NodeFault, match="no root"):
        asyncio.run(EgressNamespace(Home(tmp_path), trouble="no root").ready())


def _lookup(server: str) -> str:
    question = b"\x12\x34\x01\0\0\1\0\0\0\0\0\0\1a\7example\0\0\1\0\1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(5)
        client.sendto(question, (server, 53))
        answer, sender = client.recvfrom(512)
    assert sender == (server, 53)
    return socket.inet_ntoa(answer[-4:])


def _own_address(towards: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.connect((towards, 1))
        return str(client.getsockname()[0])
