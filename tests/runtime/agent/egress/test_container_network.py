"""The Docker network of containers with network="egress", with a daemon that makes no interface here."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpufn_core.home import Home
from gpufn_runtime.agent.egress.container_network import DEFAULT, ContainerNetwork
from tests.network_lab import living_in, network_lab


class DaemonElsewhere:
    """A daemon in another network namespace."""

    def __init__(self) -> None:
        self.networks: set[str] = set()

    async def ensure_network(self, name: str, options: Mapping[str, str], labels: Mapping[str, str]) -> None:
        self.networks.add(name)

    async def remove_network(self, name: str) -> bool:
        self.networks.discard(name)
        return True


@pytest.mark.parametrize("trouble", ["", "no root"])
def test_where_the_agent_cannot_filter_containers_have_dockers_bridge(tmp_path: Path, trouble: str) -> None:
    daemon = DaemonElsewhere()
    network = ContainerNetwork(daemon, Home(tmp_path), owner={}, trouble=trouble)
    with network_lab() as lab, living_in(lab.node):
        assert asyncio.run(network.ready()) == DEFAULT
        tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    assert (bool(network.trouble), daemon.networks, tables) == (True, set(), "")
