"""`GET /v1/costs`, and budgets that warn and stop, on a real bus."""

from __future__ import annotations

import csv
import io
import threading
from pathlib import Path
from typing import Any

import pytest

from gpufn_core.domain.team import Team
from gpufn_core.domain.usage import Usage, UsageKey, day_of
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_gateway.costs import budgets as budget_checks
from gpufn_gateway.costs import groups
from gpufn_gateway.costs import ledger as ledgers
from gpufn_gateway.functions.deploy_checks import DeployOptions
from gpufn_gateway.history.blocks import SECONDS_10, Event, encode_blocks, subject_of
from gpufn_gateway.history.fields import Field, Points
from gpufn_gateway.routes import costs as cost_routes
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.bus.storage import streams
from tests.gateway.whole import DIGEST, Whole, gateway_on
from tests.waiting import until_async

_PRICES = """
currency = "EUR"
gpu_hour = 2.0
[budgets."team:costs"]
month = 3.0
warn = 0.5
stop = true
[budgets."function:prod/costs/free"]
month = 1000.0
"""


def settings(folder: Path) -> GatewaySettings:
    path = folder / "prices.toml"
    path.write_text(_PRICES)
    return GatewaySettings(prices=str(path))


async def _hold(gateway: Whole, function: str, gpu_s: float) -> None:
    """Store ten seconds of the history in which workers of a function held GPUs."""
    points: Points = {f"function:{function}": {Field.GPU_HELD_MS: int(gpu_s * 1000)}}
    (payload,) = encode_blocks(SECONDS_10, int(gateway.clock.time()) // SECONDS_10, "gw", points)
    await gateway.bus.publish_stored(subject_of(SECONDS_10), payload)
    await gateway.recorder.store()


async def test_costs_are_grouped_and_a_team_that_used_up_its_budget_is_stopped(
    nats: Any, tmp_path: Path, make: Any, problem: Any
) -> None:
    function = "prod/costs/predict"
    async with gateway_on(nats, settings=settings(tmp_path), history=tmp_path / "history") as gateway:
        await streams.purge(gateway.bus, subjects.HISTORY, subjects.HISTORY_FILTER)
        await gateway.buckets.teams.put("costs", encode(Team(name="costs", owns=("prod/costs/*",))))
        await gateway.deploys.deploy(make.spec(function), DIGEST, DeployOptions(check=False))
        await until_async(lambda: gateway.registry.teams.name_of(function) == "costs")
        day = day_of(gateway.clock.time())
        records = gateway.buckets.usage
        await records.put(UsageKey(day, function, "k1").record("node.a"), encode(Usage(4, 0, 3600.0, 2700.0)))
        await records.put(UsageKey(day, function, "platform").record("b"), encode(Usage(1, 0, 900.0, 900.0)))
        await _hold(gateway, function, 4500.0)

        async def costs(by: str) -> Any:
            found = (await gateway.http.get(f"/v1/costs?by={by}&since={day}")).json()
            assert found["currency"] == "EUR"
            ours = [each for each in found["costs"] if "costs" in "".join(map(str, each.values()))]
            return [[each["used"], each["idle"]] for each in ours]

        assert await costs("team,key") == [[1.5, 0.375], [0.5, 0.125]]
        assert await costs("team") == await costs("app") == await costs("function") == [[2.0, 0.5]]
        focus = await gateway.http.get(f"/v1/costs?format=focus&since={day}")
        odd = await gateway.http.get("/v1/costs?format=xml")
        wrong = await gateway.http.get("/v1/costs?by=function,colour")
        year = await gateway.http.get("/v1/costs?since=2020-01-01")
        await gateway.budgets.check_all()
        gateway.budgets.check(function)  # warned, not stopped
        await records.put(UsageKey(day, function, "k2").record("b"), encode(Usage(1, 0, 1800.0, 1800.0)))
        for _ in range(2):
            await gateway.budgets.check_all()
        refused = await gateway.http.post(f"/v1/functions/{function}/invoke", json={})
        budgets = (await gateway.http.get("/v1/costs")).json()["budgets"]
        marks: list[Event] = list(gateway.sampler.events)
        await gateway.http.delete(f"/v1/functions/{function}")
        await gateway.buckets.teams.delete("costs")
    assert (problem(wrong), problem(year)) == ((422, "invalid_input"), (422, "invalid_input"))
    billed = [
        float(row["BilledCost"]) for row in csv.DictReader(io.StringIO(focus.text)) if row["ResourceId"] == function
    ]
    assert (len(billed), sum(billed)) == (2, 2.5)
    assert (focus.headers["content-type"], problem(odd)) == ("text/csv; charset=utf-8", (422, "invalid_input"))
    assert problem(refused) == (429, "rate_limited")
    assert {each["subject"]: round(each["spent"], 3) for each in budgets} == {
        "team:costs": 3.0,
        "function:prod/costs/free": 0.0,
    }
    assert [mark.subject for mark in marks] == ["team:costs"] * 2


async def test_a_thread_does_the_work_on_many_rows(nats: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the rows of a month of many functions kept the event loop busy for seconds."""
    threads: dict[str, set[threading.Thread]] = {}

    def watched(module: Any, name: str) -> None:
        work = getattr(module, name)

        def run(*arguments: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread())
            return work(*arguments, **options)

        monkeypatch.setattr(module, name, run)

    for module, name in ((ledgers, "_decode"), (ledgers, "costs"), (groups, "parts_of"), (cost_routes, "focus_csv")):
        watched(module, name)
    watched(budget_checks, "spent_by_subject")
    async with gateway_on(nats, settings=settings(tmp_path), history=tmp_path / "history") as gateway:
        await gateway.recorder.store()
        day = day_of(gateway.clock.time())
        await gateway.buckets.usage.put(UsageKey(day, "prod/costs/f", "k1").record("a"), encode(Usage(4, 0, 1.0)))
        assert (await gateway.http.get("/v1/costs?by=app")).status_code == 200
        assert (await gateway.http.get("/v1/costs?format=focus")).status_code == 200
        await gateway.budgets.check_all()
    assert set(threads) == {"_decode", "costs", "parts_of", "focus_csv", "spent_by_subject"}
    assert len({thread for each in threads.values() for thread in each}) == 1
    assert threading.main_thread() not in threads["costs"]


async def test_costs_are_unavailable_until_the_history_is_loaded(nats: Any, problem: Any) -> None:
    """Bug: status 500 looked like a fault that no retry ends."""
    async with gateway_on(nats) as gateway:
        refused = await gateway.http.get("/v1/costs")
    assert problem(refused) == (503, "history_unavailable")
    assert (refused.json()["retryable"], int(refused.headers["retry-after"]) >= 1) == (True, True)
