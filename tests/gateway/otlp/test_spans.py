"""The export of spans to collectors, good and bad ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from gpufn_core.protocol.spans import Span, SpanError, SpanKind
from gpufn_gateway.otlp import exporter as exporters
from gpufn_gateway.otlp.exporter import BATCH, MAX_QUEUED, Exporter
from gpufn_gateway.otlp.spans import SpanCollector
from tests import otlp
from tests.waiting import until

TRACE, SPAN, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"


def span(id_: str = SPAN) -> Span:
    return Span(
        TRACE, id_, PARENT, "f", SpanKind.CONSUMER, "f", 1.0, 2.5, {"faas.name": "f", "gpufn.attempt": 2},
        SpanError("function_raised", "no"), (TRACE, PARENT),
    )  # fmt: skip


@pytest.fixture
def server() -> Iterator[otlp.Collector]:
    with otlp.collector() as server:
        yield server


@pytest.fixture
def open_exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Exporter[Span]]]:
    """Make exporters that send at once, and do not wait for a collector at the end."""
    monkeypatch.setattr(exporters, "_DELAY_S", 0.0)
    opened: list[Exporter[Span]] = []

    def open_one(url: str) -> Exporter[Span]:
        collector = SpanCollector(url, timeout_s=0.2)
        opened.append(Exporter("spans", collector.send, collector.interrupt))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close(wait_s=0.0)


def test_a_span_arrives_with_its_times_attributes_error_and_link(
    server: otlp.Collector, open_exporter: Callable[[str], Exporter[Span]]
) -> None:
    exporter = open_exporter(server.url)
    exporter.add([span()])
    until(lambda: exporter.exported == 1)
    (sent,) = server.spans
    assert (sent.trace_id.hex(), sent.span_id.hex(), sent.parent_span_id.hex()) == (TRACE, SPAN, PARENT)
    assert (sent.name, sent.kind, sent.status.code) == ("f", otlp.CONSUMER, otlp.ERROR)
    assert (sent.start_time_unix_nano, sent.end_time_unix_nano) == (1_000_000_000, 2_500_000_000)
    assert otlp.attributes(sent) == {"faas.name": "f", "gpufn.attempt": 2, "error.type": "function_raised"}
    assert otlp.attributes(sent.events[0]) == {"exception.type": "function_raised", "exception.message": "no"}
    assert [link.span_id.hex() for link in sent.links] == [PARENT]
    assert server.services == {"gpufn"}


def test_a_collector_that_hangs_costs_spans_and_no_time(
    server: otlp.Collector, open_exporter: Callable[[str], Exporter[Span]]
) -> None:
    server.hangs = threading.Event()
    exporter = open_exporter(server.url)
    exporter.add([span()])
    until(lambda: server.requests == 1)
    exporter.add([span()] * (MAX_QUEUED + 10))
    assert exporter.dropped == 10
    until(lambda: exporter.failed > 0)
    server.hangs.set()


@pytest.mark.parametrize("status", [400, 401, 500])
def test_a_collector_that_refuses_gets_the_next_spans(
    server: otlp.Collector,
    open_exporter: Callable[[str], Exporter[Span]],
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.status = status
    exporter = open_exporter(server.url)
    exporter.add([span()])
    until(lambda: exporter.failed == 1)
    exporter.add([span()])
    until(lambda: exporter.failed == 2)
    warnings = [record for record in caplog.records if record.name == exporters.__name__]
    assert len(warnings) == 1  # not one for each span
    server.status = 200
    exporter.add([span()])
    until(lambda: exporter.exported == 1)


def test_a_collector_that_is_away_or_returns_garbage_harms_nothing(
    server: otlp.Collector, open_exporter: Callable[[str], Exporter[Span]]
) -> None:
    away = open_exporter("http://127.0.0.1:1/v1/traces")
    away.add([span()])
    server.body = b"\xff" * 1000
    garbage = open_exporter(server.url)
    garbage.add([span()])
    until(lambda: away.failed == 1 and garbage.exported + garbage.failed == 1)


def test_a_span_with_an_id_that_is_none_costs_its_batch_and_not_the_export(
    server: otlp.Collector, open_exporter: Callable[[str], Exporter[Span]]
) -> None:
    exporter = open_exporter(server.url)
    exporter.add([span("not an id")])
    until(lambda: exporter.failed == 1)
    exporter.add([span()] * (BATCH + 1))
    until(lambda: exporter.exported == BATCH + 1)


def test_remaining_spans_are_sent_at_the_end(server: otlp.Collector) -> None:
    collector = SpanCollector(server.url)
    exporter = Exporter("spans", collector.send, collector.interrupt)
    exporter.add([span()])
    exporter.close()
    assert len(server.spans) == 1
