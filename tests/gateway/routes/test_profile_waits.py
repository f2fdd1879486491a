"""The waits before a profile: for the report of a new worker, and for a slow call."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import CallLocation
from gpufn_core.protocol.profiles import ProfileReply
from gpufn_core.protocol.reports import NodeReport, ProcessReport
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.routes import profiles
from gpufn_gateway.routes.profiles import ProfileRoutes
from gpufn_platform.bus.connection import Bus
from tests.gateway.whole import DIGEST, gateway_on

URL = "/v1/functions/waited/profile"
SLOW = {"seconds": 1, "slower_than_s": 5, "wait_s": 300}


def respond(bus: Bus, subject: str, reply: Any) -> None:
    bus.subscribe(subject, lambda message: bus.publish(message.reply, encode(reply)))


@pytest.fixture(autouse=True)
def fast_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_LOOK_S", 0.01)


@pytest.mark.parametrize("is_reported", [True, False])
async def test_the_call_of_a_new_worker_is_profiled_once_its_node_reports_the_worker(
    nats: Any, make: Any, problem: Any, monkeypatch: pytest.MonkeyPatch, is_reported: bool
) -> None:
    """Bug: for up to a second after a cold start, no worker ran the call."""
    monkeypatch.setattr(profiles, "_REPORTED_S", 60.0 if is_reported else 0.0)
    call = "01k9xq3zr7c8m2v5t000000011"
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("waited"), DIGEST)
        looked = asyncio.Event()
        workers_of = ProfileRoutes._workers_of

        def look(routes: ProfileRoutes, function: str) -> dict[str, str]:
            looked.set()
            return workers_of(routes, function)

        monkeypatch.setattr(ProfileRoutes, "_workers_of", look)
        respond(gateway.bus, subjects.WHEREABOUTS, CallLocation(call, "w-1", "n", 1, 0.0))
        respond(gateway.bus, subjects.profile("n"), ProfileReply("f (app.py:1) 7\n"))
        body = {"seconds": 1, "call": call, "format": "folded"}
        profiling = asyncio.create_task(gateway.http.post(URL, json=body))
        await looked.wait()
        if is_reported:
            processes = (ProcessReport("w-1", "waited", 1, 7, 0.0),)
            gateway.registry.receive_node_report(NodeReport("n", gateway.clock.time(), (), processes=processes))
            assert (await profiling).text == "f (app.py:1) 7\n"
        else:
            assert problem(await profiling) == (404, "invocation_not_found")


async def test_the_waits_of_a_gateway_are_bounded(
    nats: Any, make: Any, problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: any number of requests looked at all workers five times a second, each for five minutes."""
    monkeypatch.setattr(profiles, "WAITS_AT_ONCE", 2)
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("waited"), DIGEST)
        tasks = [asyncio.create_task(gateway.http.post(URL, json=SLOW)) for _ in range(3)]
        try:
            done, waiting = await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert [problem(task.result()) for task in done] == [(503, "capacity")]
            assert len(waiting) == 2
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_wait_ends_with_its_key(nats: Any, make: Any, problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("waited"), DIGEST)
        (key, secret), (other, _) = (new_key(name, ("deploy",), 0.0) for name in ("k", "other"))
        gateway.access.put(key)
        gateway.access.put(other)
        monkeypatch.setattr(profiles, "slow_call", lambda *_: gateway.access.remove(key.id))
        answer = await gateway.http.post(URL, json=SLOW | {"wait_s": 1}, headers={"authorization": f"Bearer {secret}"})
        assert problem(answer) == (401, "unauthorized")


async def test_a_wait_ends_with_its_client(nats: Any, make: Any) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("waited"), DIGEST)
        body = msgspec.json.encode(SLOW | {"wait_s": 1})
        events = [{"type": "http.request", "body": body}, *[{"type": "http.disconnect"}] * 2]
        sent: list[Any] = []

        async def receive() -> Any:
            return events.pop(0)

        async def send(event: Any) -> None:
            sent.append(event)

        scope = {
            "type": "http", "method": "POST", "path": URL, "raw_path": URL.encode(), "query_string": b"",
            "headers": [(b"host", b"127.0.0.1"), (b"content-length", b"%d" % len(body))],
            "scheme": "http", "root_path": "", "client": ("127.0.0.1", 1),
        }  # fmt: skip
        await gateway.app(scope, receive, send)
        assert sent == []
