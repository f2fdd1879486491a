"""User code that misbehaves ends at most its own worker, and its caller receives the reason."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Platform

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "hostile.py"


@pytest.fixture(scope="module")
def hostile(platform: Platform) -> Iterator[Platform]:
    platform.gpufn("deploy", APP)
    assert platform.invoke("good") == 2
    yield platform
    for function in platform.client.get("/v1/functions").json()["functions"]:
        platform.client.delete(f"/v1/functions/{function['name']}")


def problem(platform: Platform, function: str, body: Any = None) -> dict[str, Any]:
    answer = platform.post(function, body)
    assert answer.status_code >= 400, answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")
    assert platform.invoke("good", {"x": 4}) == 5, "the neighbours live on"
    return dict(answer.json())


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("segfaults", ["SIGSEGV", "Segmentation fault"]),
        ("leaves", ["exited with code 7"]),
    ],
)
def test_the_error_of_a_worker_that_dies_has_the_reason(hostile: Platform, function: str, said: list[str]) -> None:
    found = problem(hostile, function)
    assert (found["code"], found["retryable"]) == ("worker_lost", True)
    for words in said:
        assert words in found["detail"]


def test_memory_without_end_ends_the_call_and_not_the_machine(hostile: Platform) -> None:
    found = problem(hostile, "eats_memory")
    # Where a cgroup holds the worker the kernel ends it; where a limit of its own does, Python raises.
    assert found["code"] in ("worker_lost", "function_raised")
    assert "memory" in found["detail"].lower() or found.get("error_type") == "MemoryError"


def test_a_call_that_blocks_for_ever_ends_at_its_timeout(hostile: Platform) -> None:
    found = problem(hostile, "blocks")
    assert found["code"] == "invocation_timed_out"
    assert "1 s" in found["detail"]


def test_a_flood_of_output_is_bounded_and_marked_as_cut(hostile: Platform) -> None:
    assert hostile.invoke("prints_a_flood") == "printed"
    assert hostile.invoke("good", {"x": 1}) == 2
    answer = hostile.client.get("/v1/functions/prints-a-flood/logs", params={"tail": 20_000})
    assert len(answer.content) < 64 << 20
    assert "dropped" in answer.text


def test_a_function_may_fork(hostile: Platform) -> None:
    assert hostile.invoke("forks") == 0


def test_a_call_that_holds_the_gil_longer_than_the_acknowledgement_wait_runs_once(
    hostile: Platform, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    assert hostile.invoke("holds_the_gil", {"seconds": 10, "runs": str(runs)}) == "held"
    assert runs.read_text() == "once\n"


def test_the_environment_of_a_worker_holds_no_credential(hostile: Platform) -> None:
    environment = hostile.invoke("reads_its_environment")
    assert not [name for name in environment if "NATS" in name or "KEY" in name or "TOKEN" in name]
    assert not [value for value in environment.values() if "nats://" in value]
    pids = json.loads((hostile.home / "up.json").read_bytes())["pids"]
    of_others = hostile.invoke("reads_the_environment_of", {"pids": [pids[name] for name in sorted(pids)]})
    assert not [line for text in of_others for line in text.splitlines() if "nats://" in line]


def test_garbage_on_its_socket_costs_a_worker_its_life_only(hostile: Platform) -> None:
    assert problem(hostile, "writes_garbage_to_its_socket")["code"] == "worker_lost"


def test_an_exception_without_a_message_is_reported_by_its_type(hostile: Platform) -> None:
    found = problem(hostile, "raises_what_cannot_be_encoded")
    assert (found["code"], found["error_type"]) == ("function_raised", "Unspeakable")


@pytest.mark.parametrize(
    ("function", "said"),
    [("returns_what_cannot_be_encoded", "cannot be sent as application/json"), ("returns_too_much", "more than the")],
)
def test_an_unencodable_result_reports_the_reason(hostile: Platform, function: str, said: str) -> None:
    found = problem(hostile, function)
    assert found["code"] == "result_not_encodable"
    assert said in found["detail"]


def test_an_exception_has_the_users_traceback_and_none_of_ours(hostile: Platform) -> None:
    found = problem(hostile, "raises")
    assert (found["code"], found["error_type"], found["detail"]) == (
        "function_raised", "ValueError", "a value that is no good",
    )  # fmt: skip
    assert "hostile.py" in found["traceback"]
    assert "gpufn_runtime" not in found["traceback"]


def test_the_platform_still_serves_calls_after_all_attacks(hostile: Platform) -> None:
    began = time.monotonic()
    assert hostile.client.get("/readyz").status_code == 200
    assert hostile.invoke("good", {"x": 2}) == 3
    assert hostile.process.poll() is None
    assert time.monotonic() - began < 30
