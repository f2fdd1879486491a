"""`GET /v1/usage` over the records of all nodes, and the metric for attempts."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.domain.usage import Usage, UsageKey, days
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import FunctionTotals, TotalsReport
from tests.gateway.whole import DIGEST, gateway_on

_ROWS = {
    ("2026-11-20", "f", "platform", "a"): Usage(1, 0, 1.0, 0.5),
    ("2026-11-20", "f", "platform", "b.example"): Usage(2, 1, 3.0, 1.5),
    ("2026-11-20", "g", "k1", "a"): Usage(1, 0, 1.0),
    ("2026-11-21", "f", "k1", "a"): Usage(5, 0, 5.0, 5.0),
}


@pytest.mark.parametrize(
    ("query", "told"),
    [
        (
            "since=2026-11-20&until=2026-11-21",
            [
                ("2026-11-20", "f", "platform", 3, 2.0),
                ("2026-11-20", "g", "k1", 1, 0.0),
                ("2026-11-21", "f", "k1", 5, 5.0),
            ],
        ),
        ("since=2026-11-20&until=2026-11-21&function=f&key=k1", [("2026-11-21", "f", "k1", 5, 5.0)]),
        ("since=2026-11-21&until=2026-11-21", [("2026-11-21", "f", "k1", 5, 5.0)]),
        ("since=2026-11-22&until=2026-11-21", []),
        ("since=9999-12-31&until=0001-01-01", []),
    ],
)
async def test_usage_is_added_up_over_nodes_for_the_requested_days(
    nats: Any, query: str, told: list[tuple[object, ...]]
) -> None:
    async with gateway_on(nats) as gateway:
        for (*which, node), usage in _ROWS.items():
            await gateway.buckets.usage.put(UsageKey(*which).record(node), encode(usage))
        rows = (await gateway.http.get(f"/v1/usage?{query}")).json()["usage"]
    assert [
        (row["day"], row["function"], row["key"], row["usage"]["calls"], row["usage"]["gpu_s"]) for row in rows
    ] == told


async def test_usage_is_found_under_either_spelling_and_an_unknown_function_is_an_error(
    nats: Any, make: Any, problem: Any
) -> None:
    async with gateway_on(nats) as gateway:
        await gateway.deploys.deploy(make.spec("not-called"), DIGEST)
        deleted = UsageKey("2026-10-01", "was-deleted", "platform").record("a")
        await gateway.buckets.usage.put(deleted, encode(Usage(1, 0, 1.0)))
        days_of_it = "since=2026-10-01&until=2026-10-01"
        found = await gateway.http.get(f"/v1/usage?{days_of_it}&function=was_deleted")
        none_yet = await gateway.http.get(f"/v1/usage?{days_of_it}&function=not_called")
        unknown = await gateway.http.get(f"/v1/usage?{days_of_it}&function=mistyped")
        no_name = await gateway.http.get(f"/v1/usage?{days_of_it}&function=A/b")
    assert [row["function"] for row in found.json()["usage"]] == ["was-deleted"]
    assert none_yet.json() == {"usage": []}
    assert (problem(unknown), problem(no_name)) == ((404, "function_not_found"), (422, "invalid_input"))


async def test_the_usage_of_a_function_includes_that_of_its_variants(nats: Any) -> None:
    async with gateway_on(nats) as gateway:
        for name in ("clf", "clf=3f2a9c1b0d", "clf2=3f2a9c1b0d"):
            await gateway.buckets.usage.put(UsageKey("2026-08-01", name, "platform").record("a"), encode(Usage(1)))
        answer = await gateway.http.get("/v1/usage?since=2026-08-01&until=2026-08-01&function=clf")
    assert [row["function"] for row in answer.json()["usage"]] == ["clf", "clf=3f2a9c1b0d"]


async def test_unknown_energy_is_null_and_known_energy_is_added_up(nats: Any) -> None:
    usage = {"a": Usage(2, joules=300.0, joules_calls=1), "b": Usage(1), "c": Usage(1, joules=100.0, joules_calls=1)}
    async with gateway_on(nats) as gateway:
        for node, each in usage.items():
            await gateway.buckets.usage.put(UsageKey("2026-09-01", "warm", "platform").record(node), encode(each))
        await gateway.buckets.usage.put(UsageKey("2026-09-01", "zero", "platform").record("b"), encode(Usage(1)))
        rows = (await gateway.http.get("/v1/usage?since=2026-09-01&until=2026-09-01")).json()["usage"]
    assert [(row["usage"]["joules"], row["usage"]["joules_calls"]) for row in rows] == [(400.0, 2), (None, 0)]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("since=yesterday", "must be days"),
        ("since=2020-01-01&until=2026-01-01", "at most 366 days"),
        ("since=0001-01-01&until=9999-12-31", "at most 366 days"),
        ("since=2025-01-01&until=2026-01-02", "at most 366 days"),
        ("since=2026-02-30", "must be days"),
        ("since=12026-01-01", "must be days"),
        ("since=-0001-01-01", "must be days"),
        ("since=", "must be days"),
        ("until=9999-12-31T00:00", "must be days"),
    ],
)
async def test_days_that_are_none_or_too_many_are_refused(nats: Any, query: str, said: str) -> None:
    async with gateway_on(nats) as gateway:
        answer = await gateway.http.get(f"/v1/usage?{query}")
    assert (answer.status_code, said in answer.json()["detail"]) == (422, True)


def test_the_days_of_millennia_are_not_made_before_they_are_counted() -> None:
    assert next(days("0001-01-01", "9999-12-31")) == "0001-01-01"
    assert list(days("9999-12-30", "9999-12-31")) == ["9999-12-30", "9999-12-31"]


async def test_attempts_of_every_call_are_exposed_as_the_runner_counted_them(gateway: Any) -> None:
    for count in (2, 4):
        totals = FunctionTotals("f", count, 1, 0, 6.0, 2.5), FunctionTotals("cpu", count)
        gateway.registry.totals.receive(TotalsReport("a", "r", 1.0, gateway.clock.time(), totals))
    text = (await gateway.get("/metrics")).text
    told = dict(line.rsplit(" ", 1) for line in text.splitlines() if '{function="f",node="a"}' in line)
    assert told == {
        'gpufn_attempts_total{function="f",node="a"}': "4.0",
        'gpufn_attempts_failed_total{function="f",node="a"}': "1.0",
        'gpufn_attempts_seconds_total{function="f",node="a"}': "6.0",
        'gpufn_retries_total{function="f",node="a"}': "0.0",
        'gpufn_gpu_seconds_total{function="f",node="a"}': "2.5",
    }
    assert 'gpufn_attempts_total{function="cpu",node="a"} 4.0' in text
    assert 'gpufn_gpu_seconds_total{function="cpu"' not in text


async def test_a_runner_that_still_reports_beside_its_successor_is_ignored(gateway: Any) -> None:
    for runner, started_at, count in (("old", 1.0, 900), ("new", 2.0, 5), ("old", 1.0, 901)):
        report = TotalsReport("a", runner, started_at, gateway.clock.time(), (FunctionTotals("f", count),))
        gateway.registry.totals.receive(report)
    assert 'gpufn_attempts_total{function="f",node="a"} 5.0' in (await gateway.get("/metrics")).text
