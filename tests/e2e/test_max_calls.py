"""Workers that run a limited number of calls: each call of `single` has a process of its own, and none is lost."""

from __future__ import annotations

import collections
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import Platform

pytestmark = pytest.mark.e2e

CALLS = 12
APP = """
import time
import uuid

from gpufn import gpu_function

PROCESS = uuid.uuid4().hex

@gpu_function(max_calls=1, max_workers=4)
def single() -> str:
    return PROCESS

@gpu_function(max_calls=3, concurrency=2, max_workers=2)
def few() -> str:
    time.sleep(0.01)
    return PROCESS
"""


@pytest.fixture(scope="module")
def limited(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Platform:
    app = tmp_path_factory.mktemp("app") / "app.py"
    app.write_text(APP)
    platform.gpufn("deploy", app)
    return platform


@pytest.mark.parametrize(("function", "most"), [("single", 1), ("few", 3)])
def test_a_worker_runs_at_most_max_calls(limited: Platform, function: str, most: int) -> None:
    with ThreadPoolExecutor(4) as threads:
        processes = list(threads.map(lambda _: limited.invoke(function), range(CALLS)))
    assert max(collections.Counter(processes).values()) <= most


def test_submitted_calls_have_workers_of_their_own(limited: Platform) -> None:
    ids = [limited.client.post("/v1/functions/single/submit", json={}).json()["id"] for _ in range(CALLS)]
    processes = [limited.client.get(f"/v1/invocations/{id_}/result", params={"wait": 60}).json() for id_ in ids]
    assert len(set(processes)) == CALLS
