"""Order of priority classes, and the classes that a key may use. A key closes the platform, so it is a separate one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import Platform, running_platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "classes.py"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("classes") / "home") as platform:
        platform.gpufn("deploy", APP)
        yield platform


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


def test_a_key_is_held_to_its_limits(own: Platform, tmp_path: Path) -> None:
    wrong = own.try_gpufn("keys", "create", "--rate=-5/s")
    assert (wrong.returncode, "is not a rate" in wrong.stderr) == (2, True)
    boss = own.gpufn("keys", "create", "boss").strip()
    authorized = {"authorization": f"Bearer {boss}"}
    try:
        wanted = {"scopes": ["invoke:note"], "limits": {"rate": 0.5, "burst": 3, "queued": 10}}
        made = own.client.post("/v1/keys", json=wanted, headers=authorized).json()
        with httpx.Client(base_url=own.url, headers={"authorization": f"Bearer {made['key']}"}) as client:
            body = {"path": str(tmp_path / "order"), "word": "limited"}
            urgent = client.post("/v1/functions/note/invoke", json=body, headers={"x-gpufn-priority": "hi"})
            assert (urgent.status_code, urgent.json()["code"]) == (403, "forbidden")
            answers = [client.post("/v1/functions/note/invoke", json=body) for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
            refused = answers[2]
            assert refused.json()["code"] == "rate_limited"
            assert refused.headers["ratelimit-policy"] == '"rate";q=3;w=6'
            assert 1 <= int(refused.headers["retry-after"]) <= 2
    finally:
        for key in own.client.get("/v1/keys", headers=authorized).json()["keys"][::-1]:
            assert own.client.delete(f"/v1/keys/{key['id']}", headers=authorized).status_code == 204
