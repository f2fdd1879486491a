from __future__ import annotations

import threading

import pytest

from gpufn import Client
from gpufn.cli.calls import wait_reasons
from gpufn.cli.calls.wait_reasons import report_waits
from tests.sdk.conftest import StubGateway

_DETAIL = "n1: it has no L4 GPU"
WHY = {"function": "f", "waiting": {"reason": "no_capacity", "detail": _DETAIL}}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_reasons, "_POLL_S", 0.001)


def test_at_a_terminal_a_waiting_call_shows_the_reason(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    gateway.on("GET /v1/functions/f/why", WHY)
    gateway.on("GET /v1/functions/f/why", {"function": "f"})
    reasons: list[str] = []
    runs = threading.Event()

    def show(reason: str) -> None:
        reasons.append(reason)
        if reason == "running":
            runs.set()

    with Client() as client, report_waits(client, "f", show):
        assert runs.wait(30)
    assert reasons[:2] == [_DETAIL, "running"]


def test_a_key_without_the_right_to_query_is_ignored(gateway: StubGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    gateway.on("GET /v1/functions/f/why", {"code": "forbidden"}, status=403)
    with Client() as client, report_waits(client, "f", pytest.fail):
        while not gateway.requests:
            pass
    assert len(gateway.requests) == 1, "once is enough"


def test_without_a_terminal_each_new_reason_is_a_line_on_standard_error(
    gateway: StubGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.on("GET /v1/functions/f/why", WHY)
    gateway.on("GET /v1/functions/f/why", {"function": "f", "waiting": {"reason": "no_capacity", "detail": "again"}})
    gateway.on(
        "GET /v1/functions/f/why", {"function": "f", "waiting": {"reason": "starting", "detail": "a worker starts"}}
    )
    gateway.on("GET /v1/functions/f/why", {"function": "f"})
    with Client() as client, report_waits(client, "f", pytest.fail):
        while len(gateway.requests) < 5:
            pass
    assert capsys.readouterr().err == f"f is waiting: {_DETAIL}\nf is waiting: a worker starts\n"


def test_with_json_and_without_a_terminal_standard_error_is_left_to_the_error(gateway: StubGateway) -> None:
    with Client() as client, report_waits(client, "f", pytest.fail, json=True):
        pass
    assert gateway.requests == []
