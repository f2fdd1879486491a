"""Workers with network="egress", on a platform whose node and internet are network namespaces (`tests.network_lab`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gpufn_core.home import Home
from tests.conftest import Platform, missing, running_platform
from tests.network_lab import (
    ALLOWED,
    GATEWAY,
    METADATA,
    NAME,
    NODE,
    PORT,
    PRIVATE,
    PUBLIC,
    RESOLVER,
    living_in,
    network_lab,
)

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "egress.py"


@pytest.fixture(scope="module")
def platform_(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("egress")
    (folder / "resolv.conf").write_text(f"nameserver {RESOLVER}\n")
    own_resolver = f'mount --bind {folder}/resolv.conf /etc/resolv.conf && exec "$@"'
    with (
        network_lab() as lab,
        living_in(lab.node),
        running_platform(
            folder / "home",
            environ={"GPUFN_EGRESS_ALLOW": f"{ALLOWED}/32", "GPUFN_SANDBOX_FOLDERS": ""},
            wrapper=("unshare", "--mount", "sh", "-c", own_resolver, "sh"),
        ) as platform,
    ):
        (node,) = platform.client.get("/v1/nodes").json()["nodes"]
        if trouble := node["isolation_trouble"].get("egress"):
            missing(f"a kernel that allows all parts of the sandbox: {trouble}")
        platform.gpufn("deploy", APP)
        yield platform


def test_a_worker_reaches_the_internet_and_nothing_else(platform_: Platform) -> None:
    nats = json.loads(Home(platform_.home).up_file.read_bytes())["nats_url"]
    gateway, bus = (urlsplit(url).port for url in (platform_.url, nats))
    refused = [
        (PRIVATE, PORT),
        (METADATA, PORT),
        (GATEWAY, PORT),
        (NODE, gateway),
        ("127.0.0.1", gateway),
        ("127.0.0.1", bus),
    ]
    outcomes = platform_.invoke("reach", {"targets": [(PUBLIC, PORT), (ALLOWED, PORT), *refused]})
    assert outcomes[:2] == [None, None]
    assert None not in outcomes[2:]


def test_a_worker_finds_names_by_the_nodes_resolver(platform_: Platform) -> None:
    assert platform_.invoke("resolve", {"name": NAME}) == PUBLIC


def test_workers_do_not_reach_each_other(platform_: Platform) -> None:
    address = platform_.invoke("listen")
    assert None not in platform_.invoke("reach", {"targets": [(address, 9090), ("127.0.0.1", 9090)]})
    assert platform_.invoke("abstract") == "PermissionError"
