"""`gpufn down`, and SIGTERM of one process: running calls finish within the grace period, or run again later."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpufn_core.home import Home
from gpufn_platform.process import grace_period
from tests.conftest import Platform, running_platform
from tests.e2e.chaos.faults import of_up
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "ledger.py"
WITHIN_S = 60.0
Line = dict[str, Any]


def read(ledger: Path) -> list[Line]:
    return [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []


def starts(ledger: Path, calls: int = 1) -> list[Line]:
    """Wait until this many calls have started. Return their lines."""
    until(lambda: len(started(ledger)) >= calls, lambda: f"{len(started(ledger))} of {calls} calls have started")
    return started(ledger)


def started(ledger: Path) -> list[Line]:
    return [line for line in read(ledger) if line["what"] == "start"]


def submit(platform: Platform, ledger: Path, seconds: float) -> str:
    answer = platform.client.post("/v1/functions/long/submit", json={"path": str(ledger), "seconds": seconds})
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def record(platform: Platform, call: str) -> dict[str, Any]:
    """Return the record of a call after its end."""
    platform.client.get(f"/v1/invocations/{call}/result?wait=50")
    found: dict[str, Any] = platform.client.get(f"/v1/invocations/{call}").json()
    return found


def attempts(found: dict[str, Any]) -> list[tuple[int, str, str]]:
    return [(each["number"], each["reason"], each["outcome"]) for each in found["attempts"]]


class Waiting:
    """A client that waits for the result of a call."""

    def __init__(self, platform: Platform, ledger: Path, seconds: float) -> None:
        self._url = f"{platform.url}/v1/functions/long/invoke"
        self._body = {"path": str(ledger), "seconds": seconds}
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()

    def _call(self) -> None:
        self._answer = httpx.post(self._url, json=self._body, timeout=WITHIN_S)

    def answer(self) -> httpx.Response:
        self._thread.join(WITHIN_S)
        return self._answer


class Ups:
    """`gpufn up` of one home. A test stops it; the platform that a test leaves serves the next one."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._grace = ""
        self._running = contextlib.ExitStack()
        self._platform: Platform | None = None

    def up(self, grace: str) -> Platform:
        """Return a running platform with this grace period and the function `long`."""
        if self._platform is None or self._platform.process.poll() is not None or grace != self._grace:
            self.close()
            self._grace = grace
            self._platform = self._running.enter_context(running_platform(self.home, "--grace", grace))
            self._platform.gpufn("deploy", APP)
        return self._platform

    def close(self) -> None:
        self._platform = None
        self._running.close()


@pytest.fixture(scope="module")
def ups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ups]:
    with contextlib.closing(Ups(tmp_path_factory.mktemp("down") / "home")) as ups:
        yield ups


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def test_a_call_that_does_not_finish_before_down_runs_again_after_up(ups: Ups, ledger: Path) -> None:
    platform = ups.up("60")
    call = submit(platform, ledger, 120)
    waiting = Waiting(platform, ledger, 120)
    starts(ledger, 2)
    platform.gpufn("down", "--grace", "0.5")
    ended_at = time.time()
    answer = waiting.answer()
    assert (answer.status_code, answer.json()["code"]) == (503, "platform_stopping")
    assert answer.json()["retryable"]
    assert int(answer.headers["retry-after"]) > 0
    found = record(ups.up("60"), call)
    assert found["state"] == "succeeded", found
    assert attempts(found) == [(1, "first", "lost"), (2, "stopped", "succeeded")]
    mine = [line for line in read(ledger) if line["call"] == call]
    assert [(line["attempt"], line["what"]) for line in mine] == [(1, "start"), (2, "start"), (2, "end")]
    assert mine[0]["process"] != mine[1]["process"]
    assert mine[1]["at"] > ended_at, "the first copy was dead before the second started"
    assert len(starts(ledger)) == 3, "the call whose client is gone does not run again"


def test_running_calls_finish_within_the_grace_period(ups: Ups, ledger: Path) -> None:
    platform = ups.up("60")
    call = submit(platform, ledger, 1.5)
    waiting = Waiting(platform, ledger, 1.5)
    starts(ledger, 2)
    platform.gpufn("down")
    assert (waiting.answer().status_code, waiting.answer().json()) == (200, "attempt 1")
    assert attempts(record(ups.up("600"), call)) == [(1, "first", "succeeded")]


def test_a_second_signal_ends_the_grace_period_and_loses_no_call(ups: Ups, ledger: Path) -> None:
    platform = ups.up("600")
    call = submit(platform, ledger, 120)
    starts(ledger)
    platform.process.send_signal(signal.SIGTERM)
    until(lambda: grace_period.is_stopping(Home(ups.home)))
    platform.process.send_signal(signal.SIGTERM)
    platform.process.wait(WITHIN_S)
    assert attempts(record(ups.up("0.5"), call)) == [(1, "first", "lost"), (2, "stopped", "succeeded")]


def test_sigterm_of_one_process_loses_no_call(ups: Ups, ledger: Path) -> None:
    platform = ups.up("0.5")
    adopted = submit(platform, ledger, 3)
    starts(ledger)
    [runner] = of_up(ups.home, "runner")()
    os.kill(runner, signal.SIGTERM)
    assert attempts(record(platform, adopted)) == [(1, "first", "succeeded")]
    handed_back = submit(platform, ledger, 120)
    starts(ledger, 2)
    [agent] = of_up(ups.home, "agent")()
    os.kill(agent, signal.SIGTERM)
    assert attempts(record(platform, handed_back)) == [(1, "first", "lost"), (2, "stopped", "succeeded")]
    both = submit(platform, ledger, 120)
    starts(ledger, 4)
    for name in ("runner", "agent"):
        [pid] = of_up(ups.home, name)()
        os.kill(pid, signal.SIGTERM)
    found = record(platform, both)
    assert [(each["number"], each["outcome"]) for each in found["attempts"]] == [(1, "lost"), (2, "succeeded")]
