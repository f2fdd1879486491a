"""The wait for a slow call to profile: how many wait, and what ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gpufn_gateway.auth.access import new_key
from gpufn_gateway.routes import profiles
from tests.gateway.whole import DIGEST, gateway_on

URL = "/v1/functions/waited/profile"
SLOW = {"seconds": 1, "slower_than_s": 5, "wait_s": 300}


@pytest.fixture(autouse=True)
def fast_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_LOOK_S", 0.01)


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
