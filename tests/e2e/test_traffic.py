"""A function whose calls are split between two revisions, on a whole platform, until the split returns by itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufn import Function
from tests.conftest import Platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

NAME = "splits"
CALLS = 40

APP = """
from gpufn import gpu_function

@gpu_function(name="splits", max_workers=4, retries=0)
def splits(number: float) -> list[float]:
    if {fails} and number < 0:
        raise ValueError("negative")
    return [{version}, number * {factor}]

@gpu_function(name="asks-splits")
def asks(numbers: list[float]) -> list[list[float]]:
    return [splits.remote(each) for each in numbers]
"""


@pytest.fixture
def two_revisions(platform: Platform, tmp_path: Path) -> Iterator[Platform]:
    file = tmp_path / "app.py"
    file.write_text(APP.format(version=1, factor="1", fails=False))
    platform.gpufn("deploy", file)
    file.write_text(APP.format(version=2, factor="1.0000001", fails=True))
    platform.gpufn("deploy", file, "--traffic", "10%")
    assert traffic(platform)["weights"] == {"1": 90, "2": 10}
    yield platform
    for name in (NAME, "asks-splits"):
        platform.client.delete(f"/v1/functions/{name}")


def traffic(platform: Platform) -> dict[str, Any]:
    view: dict[str, Any] = platform.client.get(f"/v1/functions/{NAME}/traffic").json()
    return view


def revision_of(platform: Platform, **headers: str) -> int:
    answer = platform.post(NAME, {"number": 1}, headers=headers)
    assert answer.headers["x-gpufn-revision"] == f"{NAME}@{answer.json()[0]}"
    return int(answer.json()[0])


def test_calls_are_split_and_the_split_returns_when_a_revision_fails(
    two_revisions: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = two_revisions
    monkeypatch.setenv("GPUFN_URL", platform.url)
    options = ("--header", "x-canary=1:2", "--mirror", "2", "--return-if", "errors>20%", "--min-calls", "5")
    view = json.loads(platform.gpufn("traffic", NAME, "1=50,2=50", *options, "--json"))
    assert (view["weights"], view["serving"]) == ({"1": 50, "2": 50}, 1)

    until(lambda: revision_of(platform) == 2)  # the gateway has learned of the split
    assert set(Counter(revision_of(platform) for _ in range(CALLS))) == {1, 2}
    assert {revision_of(platform, **{"x-canary": "1"}) for _ in range(5)} == {2}
    assert len({revision_of(platform, **{"idempotency-key": "the same"}) for _ in range(3)}) == 1
    mapped = Function.from_name(NAME).map([1.0] * 10)
    assert len({each[0] for each in mapped}) == 1  # one map, one revision
    nested = platform.invoke("asks-splits", {"numbers": [1.0] * 10})
    assert len({each[0] for each in nested}) == 1

    counted = until(lambda: (counts := _counted(platform)) and min(counts) >= 5 and sum(counts) >= CALLS and counts)
    assert len(counted) == 2
    until(lambda: traffic(platform)["compared"]["different"])
    (difference, *_) = json.loads(platform.gpufn("traffic", NAME, "--differences", "--json"))
    assert (difference["path"], difference["answer"], difference["copy"]) == ("[0]", "1", "2")

    for _ in range(30):
        assert platform.post(NAME, {"number": -1}, headers={"x-canary": "1"}).status_code == 500
    after = until(lambda: (view := traffic(platform))["returned"] and view)
    # Not the split of the deploy, 1=90, 2=10: it has no rule.
    assert (after["weights"], after["returned"]["weights"]) == ({"1": 100}, "1=50, 2=50")
    until(lambda: "was undone" in platform.client.get(f"/v1/functions/{NAME}/why").json()["reason"])
    assert "errors>20%" in platform.gpufn("traffic", NAME)
    records = platform.client.get("/v1/audit").json()["records"]
    assert [each["principal"] for each in records if each.get("object") == NAME][-1] == "platform"
    assert json.loads(platform.gpufn("traffic", NAME, "--clear", "--json"))["weights"] == {"1": 100}
    until(lambda: {revision_of(platform) for _ in range(10)} == {1})


def _counted(platform: Platform) -> list[int]:
    return [each["total"]["calls"] for each in traffic(platform)["revisions"]]
