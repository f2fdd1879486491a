"""Requests and output of `gpufn traffic`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.sdk.cli.commands import VIEW, command
from tests.sdk.conftest import StubGateway

WORKERS = VIEW["workers"]
TRAFFIC: dict[str, Any] = {
    "function": "f",
    "active": 1,
    "serving": 1,
    "weights": {"1": 90, "2": 10},
    "set_at": 1.0,
    "headers": [{"name": "x-canary", "value": "1", "revision": 2}],
    "mirror": {"revision": 2, "percent": 5.0, "tolerance": 1e-5},
    "return_if": ["errors>2%"],
    "window_s": 60.0,
    "min_calls": 50,
    "returned": {
        "at": 1.0,
        "reason": "errors>2%: 5.0% of 120 calls in 60 s failed",
        "revision": 2,
        "weights": "1=50, 2=50",
    },
    "revisions": [
        {"revision": 1, "workers": WORKERS, "total": {"calls": 90, "errors": 1, "p50_s": 0.1, "p99_s": 0.2}},
        {"revision": 2, "workers": WORKERS, "start_error": {"code": "function_start_failed", "message": "no torch"}},
    ],
    "compared": {"revision": 2, "equal": 7, "different": 1, "failed": 0, "skipped": 2, "p50_s": 0.1, "copy_p50_s": 0.2},
}


def test_a_split_is_shown_with_its_rules_and_counts(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f/traffic", TRAFFIC)
    header, first, second, *fields = command("traffic", "f").stdout.splitlines()
    assert header.split() == ["REVISION", "PERCENT", "WORKERS", "CALLS", "ERRORS", "P50", "P99", "NOTE"]
    assert first.split()[:2] == ["1", "90"]
    assert first.endswith("90     1       100 ms  200 ms  serves")
    assert second.endswith("mirror, does not start: no torch")
    assert [line.split("  ")[0] for line in fields] == ["headers", "mirror", "compared", "returns if", "returned"]


def test_a_split_is_sent_as_a_whole(gateway: StubGateway) -> None:
    gateway.on("PUT /v1/functions/f/traffic", TRAFFIC)
    options = ("--header", "X-Canary=a:b:2", "--mirror", "2=5%", "--tolerance", "0.01", "--return-if", "p99>2x")
    assert command("traffic", "f", "2=10%,1=90", *options, "--window", "30", "--min-calls", "9").exit_code == 0
    assert json.loads(gateway.requests[-1].body) == {
        "weights": {"2": 10, "1": 90},
        "headers": [{"name": "x-canary", "value": "a:b", "revision": 2}],
        "mirror": {"revision": 2, "percent": 5.0, "tolerance": 0.01},
        "return_if": ["p99>2x"],
        "window_s": 30.0,
        "min_calls": 9,
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ("1=x",), ("1",), ("1=50,1=50",), ("--header", "x-a=1"), ("--header", "=1:2"), ("--mirror", "x"),
        ("--mirror", "2=0"), ("--mirror", "2=nan"), ("--tolerance", "0.1"), ("--window", "30"), ("--clear", "1=100"),
        ("--clear", "--differences"),
    ],
)  # fmt: skip
def test_meaningless_options_are_a_usage_error(gateway: StubGateway, arguments: tuple[str, ...]) -> None:
    assert command("traffic", "f", *arguments).exit_code == 2
    assert gateway.requests == []


def test_differences_are_a_table(gateway: StubGateway) -> None:
    one = {"at": 1.0, "invocation": "i-1", "comparison": "different", "path": ".a[2]", "answer": "1", "copy": "2"}
    gateway.on("GET /v1/functions/f/differences", {"differences": [one]})
    assert command("traffic", "f", "--differences").stdout.splitlines()[1].split()[-5:] == [
        "i-1",
        "different",
        ".a[2]",
        "1",
        "2",
    ]
