from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from gpufn_core.errors import PayloadTooLarge
from gpufn_core.protocol.report_parts import Statuses
from gpufn_core.protocol.reports import ControllerReport, FunctionStatus, WorkerCounts
from gpufn_gateway.controller.reports import Reports

_decode = msgspec.msgpack.Decoder(ControllerReport).decode


class _SmallBus:
    """A bus that takes messages of at most 8 KiB."""

    def __init__(self) -> None:
        self.server_info = {"max_payload": 8 << 10}
        self.published: list[ControllerReport] = []

    def publish(self, subject: str, payload: bytes) -> None:
        if len(payload) > self.server_info["max_payload"]:
            raise PayloadTooLarge(f"{subject}: {len(payload):,} bytes are more than the message bus takes.")
        self.published.append(_decode(payload))


class _Term:
    epoch = 7

    def time(self) -> float:
        return 0.0


def statuses(*names: str, reason: str = "") -> dict[str, FunctionStatus]:
    return {name: FunctionStatus(function=name, serving=1, workers=WorkerCounts(), reason=reason) for name in names}


@pytest.fixture
def bus() -> _SmallBus:
    return _SmallBus()


@pytest.fixture
def reports(bus: _SmallBus) -> Reports:
    term: Any = _Term()
    played: Any = bus
    return Reports(played, name="c", lease=term, clock=term)


def test_a_report_larger_than_a_message_is_sent_in_parts(bus: _SmallBus, reports: Reports) -> None:
    reports.send_all(statuses(*(f"f-{number}" for number in range(200)), reason="no room"))
    known = Statuses()
    for part in bus.published:
        known.take(part)
    assert len(bus.published) > 1
    assert all(known.get(f"f-{number}") is not None for number in range(200))


def test_a_part_that_the_bus_refuses_is_logged_once_and_the_others_go_on(
    bus: _SmallBus, reports: Reports, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gpufn_gateway.controller.reports")
    large = statuses("a") | statuses("b", reason="x" * 20_000) | statuses("c")
    for _ in range(3):
        reports.log_problem("")  # as every successful tick does
        reports.send_all(large)
    assert {status.function for report in bus.published for status in report.functions} == {"a", "c"}
    reports.send_all(statuses("a", "b", "c"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "last status: " in caplog.records[0].getMessage()
