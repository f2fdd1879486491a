"""Order of priority classes."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import Platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "classes.py"


@pytest.fixture(scope="module")
def own(platform: Platform) -> Platform:
    platform.gpufn("deploy", APP)
    return platform


def submit(platform: Platform, path: Path, priority: str) -> str:
    body = {"path": str(path), "word": priority}
    headers = {"x-gpufn-priority": priority}
    answer = platform.client.post("/v1/functions/note/submit", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def wait_for(platform: Platform, invocation: str) -> None:
    assert platform.client.get(f"/v1/invocations/{invocation}/result?wait=30").status_code == 200


def test_the_only_slot_is_given_to_the_higher_class_and_all_calls_run_in_the_end(own: Platform, tmp_path: Path) -> None:
    path = tmp_path / "order"
    gate = submit_gate(own, path)
    ids = [submit(own, path, priority) for priority in ("low", "normal", "hi") * 10]
    shown = json.loads(own.gpufn("why", "note", "--json"))["classes"]
    assert shown == {"hi": 10, "normal": 11, "low": 10}
    assert (
        own.client.get(f"/v1/invocations/{ids[0]}").json()["place"] == 21
    )  # the first call of low, behind all calls of the other classes
    with ThreadPoolExecutor(3) as pool:
        body = {"path": str(path), "word": "caller"}
        callers = [
            pool.submit(own.post, "note", body, headers={"x-gpufn-priority": priority}) for priority in ("low", "hi")
        ]
        until(lambda: own.client.get("/v1/functions/note/why").json()["classes"]["hi"] == 11)
        path.with_suffix(".open").touch()
        assert [caller.result().status_code for caller in callers] == [200, 200]
    for invocation in (gate, *ids):
        wait_for(own, invocation)
    order = path.read_text().split()
    assert Counter(order) == {"gate": 1, "caller": 2, "hi": 10, "normal": 10, "low": 10}
    assert order[1] == "caller"  # class hi, with a client that waits
    submitted = [word for word in order if word not in {"gate", "caller"}]
    assert submitted == ["hi"] * 10 + ["normal"] * 10 + ["low"] * 10


def submit_gate(platform: Platform, path: Path) -> str:
    """Submit a call that takes the only slot until the file `<path>.open` exists."""
    body = {"path": str(path), "word": "gate"}
    invocation = platform.client.post("/v1/functions/note/submit", json=body).json()["id"]
    until(path.exists)
    return str(invocation)
