"""The export of log lines to collectors, good and bad ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpufn_core.domain.trace_context import span_id
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import LogLine
from gpufn_gateway.otlp import exporter as exporters
from gpufn_gateway.otlp.exporter import BATCH_BYTES, MAX_QUEUED, MAX_QUEUED_BYTES, Exporter
from gpufn_gateway.otlp.logs import LogCollector
from tests import otlp
from tests.waiting import until

TRACE, CALL = "0af7651916cd43dd8448eb211c80319c", "01k9xq3zr7c8m2v5t000000011"
LINE = LogLine(1.5, "prod/f", 3, "w-1", "stdout", "hello", CALL, 2, "gpu-1", TRACE)


@pytest.fixture
def server() -> Iterator[otlp.Collector]:
    with otlp.collector() as server:
        yield server


@pytest.fixture
def open_exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Exporter[bytes]]]:
    """Make exporters that send at once, and do not wait for a collector at the end."""
    monkeypatch.setattr(exporters, "_DELAY_S", 0.0)
    opened: list[Exporter[bytes]] = []

    def open_one(url: str, *, has_spans: bool = True) -> Exporter[bytes]:
        collector = LogCollector(url, has_spans=has_spans, timeout_s=0.2)
        opened.append(Exporter("log lines", collector.send, collector.interrupt, bytes_of=len))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close(wait_s=0.0)


def sent(server: otlp.Collector, exporter: Exporter[bytes], *lines: LogLine) -> list[Any]:
    exporter.add([encode(line) for line in lines])
    until(lambda: exporter.exported == len(lines))
    return server.logs


def test_a_line_arrives_with_its_call_attempt_function_node_and_trace(
    server: otlp.Collector, open_exporter: Callable[..., Exporter[bytes]]
) -> None:
    (line,) = sent(server, open_exporter(server.logs_url), LINE)
    assert (line.body.string_value, line.time_unix_nano, line.severity_text) == ("hello", 1_500_000_000, "INFO")
    assert (line.trace_id.hex(), line.span_id.hex()) == (TRACE, span_id(CALL, 2))
    assert otlp.attributes(line) == {
        "faas.name": "prod/f", "faas.version": "3", "faas.invocation_id": CALL, "gpufn.attempt": 2,
        "gpufn.node": "gpu-1", "gpufn.worker": "w-1", "log.iostream": "stdout",
    }  # fmt: skip
    assert server.services == {"gpufn"}


def test_a_line_outside_a_call_has_no_trace_and_a_failure_is_an_error(
    server: otlp.Collector, open_exporter: Callable[..., Exporter[bytes]]
) -> None:
    start = LogLine(1.5, "f", 3, "w-1", "error", "no license", node="gpu-1")
    (line,) = sent(server, open_exporter(server.logs_url), start)
    assert (line.severity_text, line.trace_id, line.span_id) == ("ERROR", b"", b"")
    assert otlp.attributes(line) == {
        "faas.name": "f", "faas.version": "3", "gpufn.node": "gpu-1", "gpufn.worker": "w-1"
    }  # fmt: skip


def test_without_spans_of_the_platform_a_line_names_only_the_trace_of_the_client(
    server: otlp.Collector, open_exporter: Callable[..., Exporter[bytes]]
) -> None:
    (line,) = sent(server, open_exporter(server.logs_url, has_spans=False), LINE)
    assert (line.trace_id.hex(), line.span_id) == (TRACE, b"")


def test_a_collector_that_hangs_costs_lines_and_no_time_and_a_bounded_memory(
    server: otlp.Collector, open_exporter: Callable[..., Exporter[bytes]]
) -> None:
    server.hangs = threading.Event()
    exporter = open_exporter(server.logs_url)
    exporter.add([encode(LINE)])
    until(lambda: server.requests == 1)
    exporter.add([b"x"] * (MAX_QUEUED + 10))
    assert exporter.dropped == 10
    until(lambda: exporter.failed > 0)
    server.hangs.set()


def test_large_lines_are_bounded_by_their_bytes() -> None:
    took: list[int] = []
    waits, begun = threading.Event(), threading.Event()

    def send(batch: Any) -> str:
        begun.set()
        waits.wait(30)
        took.append(sum(map(len, batch)))
        return ""

    exporter: Exporter[bytes] = Exporter("log lines", send, lambda: None, bytes_of=len)
    large = bytes(1 << 20)
    exporter.add([large])
    begun.wait(30)
    room = MAX_QUEUED_BYTES // len(large)
    exporter.add([large] * (room + 3))
    assert exporter.dropped == 3
    waits.set()
    until(lambda: exporter.exported == 1 + room)
    assert max(took) <= BATCH_BYTES
    exporter.close()


@pytest.mark.parametrize("status", [400, 401, 500])
def test_a_collector_that_refuses_gets_the_next_lines(
    server: otlp.Collector,
    open_exporter: Callable[..., Exporter[bytes]],
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.status = status
    exporter = open_exporter(server.logs_url)
    exporter.add([encode(LINE)])
    until(lambda: exporter.failed == 1)
    exporter.add([encode(LINE)])
    until(lambda: exporter.failed == 2)
    warnings = [record for record in caplog.records if record.name == exporters.__name__]
    assert len(warnings) == 1
    assert str(status) in warnings[0].getMessage()
    server.status = 200
    sent(server, exporter, LINE)


def test_a_line_that_cannot_be_decoded_costs_no_other(
    server: otlp.Collector, open_exporter: Callable[..., Exporter[bytes]]
) -> None:
    exporter = open_exporter(server.logs_url)
    strange = LogLine(1.5, "f", 3, "w-1", "stdout", "x", trace="not an id")
    exporter.add([b"\xc1", encode(strange), encode(LINE)])
    until(lambda: exporter.exported == 3)
    assert [line.body.string_value for line in server.logs] == ["x", "hello"]
