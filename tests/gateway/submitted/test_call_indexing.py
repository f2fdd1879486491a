"""The index of ended calls in a gateway: who fills it, when, and that it shows no one the calls of others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpufn_core.errors import BusUnavailable
from gpufn_core.protocol import subjects
from gpufn_gateway.auth.access import new_key
from gpufn_gateway.submitted import call_indexing
from gpufn_gateway.submitted.call_indexing import CallIndexing
from gpufn_platform.bus.storage import streams
from gpufn_platform.queue.records.call_index import CallIndex
from tests.gateway.conftest import ManualClock
from tests.gateway.submitted.test_submitted_calls import end, record_of, submit
from tests.gateway.whole import DIGEST, gateway_on
from tests.waiting import until_async


@contextlib.asynccontextmanager
async def running(indexing: CallIndexing) -> AsyncIterator[None]:
    task = asyncio.create_task(indexing.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_is_filled_while_someone_searches_and_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    async def fill(_: Any, index: CallIndex) -> bool:
        rounds.append(1)
        if len(rounds) == 2:
            raise BusUnavailable("away")
        return len(rounds) < 5

    clock = ManualClock()
    monkeypatch.setattr(call_indexing, "fill", fill)
    monkeypatch.setattr(call_indexing, "_MIN_BREAK_S", 0.0)
    monkeypatch.setattr(call_indexing, "_COMPLETE_BREAK_S", 0.0)
    indexing = CallIndexing(None, clock)  # type: ignore[arg-type]
    async with running(indexing):
        await asyncio.sleep(0)
        assert not rounds
        indexing.searched()
        await until_async(lambda: len(rounds) > 6)
        clock.now += call_indexing._AFTER_SEARCH_S
        await until_async(lambda: not indexing.is_active)
        so_far = len(rounds)
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(rounds) == so_far
        indexing.searched()
        await until_async(lambda: len(rounds) > so_far)


async def test_a_search_with_the_index_shows_only_calls_of_functions_that_the_client_may_read(
    nats: Any, make: Any
) -> None:
    async with gateway_on(nats) as gateway:
        ids: dict[str, list[str]] = {"ours": [], "theirs": []}
        for name in ids:
            await gateway.deploys.deploy(make.spec(name), DIGEST)
        for _ in range(10):
            for name, known in ids.items():
                known.append(await submit(gateway, name))
                await end(gateway, known[-1])
                await streams.delete_message(
                    gateway.bus, subjects.ASYNC, (await record_of(gateway, known[-1])).queue_seq
                )
        key, secret = new_key("k", ("read:ours",), 0.0)
        gateway.access.put(key)
        headers = {"authorization": f"Bearer {secret}"}

        async def listed(query: str) -> list[str]:
            found, before = [], ""
            while before is not None:
                following = f"&before={before}" if before else ""
                answer = await gateway.http.get(f"/v1/calls?limit=3&{query}{following}", headers=headers)
                assert answer.status_code == 200, answer.text
                found += [call["id"] for call in answer.json()["calls"]]
                before = answer.json()["next"]
            return found

        indexing = gateway.submissions.indexing
        queries = ("state=succeeded", "key=platform", "function=ours", "state=succeeded&function=ours")
        async with running(indexing):
            for query in queries:  # with a part of the index, or none
                assert await listed(query) == ids["ours"][::-1], query
            last_seq = int((await gateway.bus.js(f"STREAM.INFO.{subjects.RESULTS}"))["state"]["last_seq"])
            await until_async(lambda: indexing.index.high > last_seq)
        for query in queries:
            assert await listed(query) == ids["ours"][::-1], query
        assert (await gateway.http.get("/v1/calls?function=theirs", headers=headers)).status_code == 404
