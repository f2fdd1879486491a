"""Bodies of up to 64 MiB, whichever way a call is made: on one machine, and with the gateway on another.

A gateway with a GPUFN_HOME of its own shares no memory with the platform's runner, as one on another machine.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gpufn import Client
from gpufn.call import transport as _transport
from gpufn.client.http_transport import HttpTransport
from tests.conftest import Platform, http_client
from tests.e2e.apps.bulky import digest, pattern, turned
from tests.e2e.chaos.gateway import Gateway, embedded_bus
from tests.e2e.test_survival import pids_of
from tests.e2e.test_two_gateways import is_ready
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "bulky.py"
MIB = 1 << 20
RAW = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def own(platform: Platform) -> Platform:
    platform.gpufn("deploy", APP)
    return platform


@pytest.fixture(scope="module")
def far(own: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A gateway with its own GPUFN_HOME, like a gateway on another machine."""
    home = tmp_path_factory.mktemp("far")
    with Gateway(home, embedded_bus(own.home)) as gateway, http_client(gateway.url) as client:
        until(lambda: is_ready(client))
        until(lambda: client.get("/v1/functions/asks").status_code == 200)
        yield client


def submitted(client: httpx.Client, function: str, body: bytes) -> str:
    answer = client.post(f"/v1/functions/{function}/submit", content=body, headers=RAW)
    assert answer.status_code == 202, answer.text
    return answer.headers["location"]


@pytest.mark.parametrize("size", [1024, 8 * MIB, 40 * MIB])
def test_a_submitted_call_carries_bodies_of_any_size(own: Platform, size: int) -> None:
    body = pattern(size)
    call = submitted(own.client, "turned", body)
    assert own.client.get(f"{call}/result?wait=60").content == body[::-1]


@pytest.mark.parametrize("size", [1024, 8 * MIB, 64 * MIB])
def test_a_call_between_machines_carries_bodies_of_any_size(far: httpx.Client, size: int) -> None:
    body = pattern(size)
    answer = far.post("/v1/functions/turned/invoke", content=body, headers=RAW)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-length"] == str(size)
    assert answer.content == body[::-1]
    call = submitted(far, "turned", body)
    assert far.get(f"{call}/result?wait=60").content == body[::-1]


def test_a_map_carries_large_items(own: Platform, far: httpx.Client) -> None:
    data = pattern(9_000_000)
    for url in (own.url, str(far.base_url)):
        transport = HttpTransport(lambda url=url: Client(url))  # type: ignore[misc]
        _transport.install(transport)
        try:
            assert [digest(each) for each in turned.map([data] * 9)] == [digest(data[::-1])] * 9
        finally:
            _transport.install(None)
            transport.close()


@pytest.mark.parametrize(("size", "count"), [(1024, 9), (8 * MIB, 3), (40 * MIB, 1)])
def test_a_function_calls_another_one_with_large_bodies(own: Platform, size: int, count: int) -> None:
    answer = own.client.post("/v1/functions/asks/invoke", json={"size": size, "count": count})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"remote": True, "spawn": True, "map": [True] * count}


def test_a_large_call_that_waits_runs_after_its_runner_was_killed(own: Platform, tmp_path: Path) -> None:
    go = tmp_path / "go"
    body = f"{go}\n".encode().ljust(8 * MIB, b".")
    calls = [submitted(own.client, "held", body) for _ in range(2)]  # one runs, one waits
    until(lambda: own.client.get(calls[0]).json()["state"] == "running")
    for pid in pids_of(own, "runner"):
        os.kill(pid, signal.SIGKILL)
    go.touch()
    for call in calls:
        answer = own.client.get(f"{call}/result?wait=60")
        assert (answer.status_code, answer.json()) == (200, digest(body))


@pytest.mark.parametrize("path", ["submit", "invoke"])
def test_a_body_above_the_limit_is_named(own: Platform, far: httpx.Client, path: str) -> None:
    size = 64 * MIB + 1
    for client in (own.client, far):
        answer = client.post(f"/v1/functions/turned/{path}", content=bytes(size), headers=RAW)
        assert answer.status_code == 413
        problem = json.loads(answer.content)
        assert (problem["code"], problem["retryable"]) == ("payload_too_large", False)
        assert "67,108,865 bytes" in problem["detail"]
        assert "64 MiB" in problem["detail"]
