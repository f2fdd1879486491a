"""Reports of the reasons why calls wait. Time is passed in; the thread never polls within a test."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from gpufn import Client
from gpufn.call.transport_protocol import EncodedCall, Target
from gpufn.client.http_transport import HttpTransport
from gpufn.client.wait_reports import ReasonLines, Subject, WaitReports
from gpufn_core.encoding import media
from gpufn_core.protocol.reports import Waiting, WaitReason
from tests.sdk.conftest import StubGateway

_F = Subject("function", "f")
WHY = {"function": "f", "waiting": {"reason": "no_capacity", "detail": "no node has a GPU"}}


class Shown(list[str]):
    def __call__(self, name: str, waiting: Waiting | None) -> None:
        self.append(f"{name}: {waiting.detail if waiting else 'running'}")


@contextlib.contextmanager
def reports(show: Callable[[str, Waiting | None], None], gateway: StubGateway):  # type: ignore[no-untyped-def]
    """Reports with a clock at zero, whose thread does not run."""
    client = Client()
    made = WaitReports(lambda: client, show, clock=lambda: 0.0)
    made._thread = threading.current_thread()
    yield made
    client.close()


def test_a_quick_call_makes_no_request(gateway: StubGateway) -> None:
    with reports(Shown(), gateway) as waits:
        with waits.watching(_F):
            waits.poll(1.9)
        waits.poll(10.0)
    assert gateway.requests == []


def test_calls_of_one_function_make_one_request_per_round_and_fewer_with_time(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f/why", WHY)
    shown = Shown()
    with reports(shown, gateway) as waits, contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(waits.watching(_F))
        for second in range(2, 32):
            waits.poll(float(second))
    assert len(gateway.requests) == len(shown) == 6
    assert set(shown) == {"f: no node has a GPU"}


def test_a_refusal_ends_the_queries(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f/why", {"code": "forbidden"}, status=403)
    with reports(Shown(), gateway) as waits, waits.watching(_F):
        waits.poll(2.0)
        waits.poll(60.0)
    assert len(gateway.requests) == 1


def test_maps_and_submitted_calls_are_reported_by_their_function(gateway: StubGateway) -> None:
    gateway.on("GET /v1/functions/f/why", WHY)
    gateway.on("GET /v1/maps/m1", {"id": "m1", "function": "f"})
    gateway.on(
        "GET /v1/invocations/c1",
        {"id": "c1", "function": "g", "revision": 1, "state": "queued", "attempt": 0, "submitted_at": 0.0,
         "waiting": {"reason": "limit", "detail": "max_workers is reached"}},
    )  # fmt: skip
    shown = Shown()
    with (
        reports(shown, gateway) as waits,
        waits.watching(Subject("map", "m1")),
        waits.watching(Subject("call", "c1")),
    ):
        waits.poll(2.0)
    assert shown == ["f: no node has a GPU", "g: max_workers is reached"]


def test_a_line_appears_once_per_reason_and_again_after_a_minute() -> None:
    written: list[str] = []
    now = [0.0]
    lines = ReasonLines(written.append, clock=lambda: now[0])
    no_gpu, limit = Waiting(WaitReason.NO_CAPACITY, "no GPU"), Waiting(WaitReason.LIMIT, "max_workers")
    for at, reason in ((0.0, no_gpu), (1.0, no_gpu), (2.0, None), (3.0, limit), (70.0, limit)):
        now[0] = at
        lines("f", reason)
    assert written == ["f is waiting: no GPU", "f is waiting: max_workers", "f is waiting: max_workers"]


class SlowClient(Client):
    """A client whose calls end when the reason has been logged."""

    logged = threading.Event()

    def invoke_raw(self, *args: Any, **options: Any) -> Answer:  # type: ignore[override]
        assert self.logged.wait(30)
        return Answer(media.JSON, b"1")


class Answer(NamedTuple):
    content_type: str
    body: bytes


class Ends(logging.Handler):
    """Keeps the records, and ends the call at the first."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))
        SlowClient.logged.set()


def test_a_waiting_call_logs_the_reason_at_the_level_warning(
    gateway: StubGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.on("GET /v1/functions/f/why", WHY)
    handler = Ends()
    monkeypatch.setattr(logging.getLogger("gpufn"), "handlers", [handler])
    transport = HttpTransport(SlowClient)
    monkeypatch.setattr(transport._waits, "_first_s", 0.001)
    assert transport.call(EncodedCall(Target("f"), media.JSON, b"[]")) == (media.JSON, b"1")
    transport.close()
    assert handler.lines == [("WARNING", "f is waiting: no node has a GPU")]
