"""Traces in memory: what is kept, for which reader."""

from __future__ import annotations

from typing import Any

from gpufn_core.protocol.spans import Span, SpanError, SpanKind
from gpufn_gateway.traces.store import MAX_SPANS, TraceStore

ALL = lambda function: True  # noqa: E731


def span(trace: str = "t1", id_: str = "a", function: str = "f", **fields: Any) -> Span:
    values: dict[str, Any] = {"name": function, "kind": SpanKind.SERVER, "start": 1.0, "end": 2.0} | fields
    return Span(trace, id_, parent="", function=function, **values)


def test_a_trace_is_found_by_its_id_and_by_its_calls() -> None:
    store = TraceStore()
    store.add([span(attributes={"faas.invocation_id": "i1"}), span(id_="b", kind=SpanKind.INTERNAL)])
    assert (store.find("t1"), store.find("i1"), store.find("i2")) == ("t1", "t1", None)
    assert [each.id for each in store.spans("t1", ALL)] == ["a", "b"]


def test_a_trace_is_named_by_its_call_and_not_by_the_request_that_submitted_it() -> None:
    store = TraceStore()
    store.add([span(id_="s", name="submit", kind=SpanKind.PRODUCER), span(name="f.m", kind=SpanKind.CONSUMER)])
    assert [each.name for each in store.recent(ALL)] == ["f.m"]
    store.add([span("t2", name="map f", kind=SpanKind.PRODUCER)])
    assert next(store.recent(ALL)).name == "map f"


def test_the_oldest_trace_makes_room() -> None:
    store = TraceStore(max_bytes=20_000)
    for number in range(100):
        store.add([span(f"t{number}", attributes={"faas.invocation_id": f"i{number}"})])
    kept = [each.id for each in store.recent(ALL)]
    assert 5 < len(kept) < 20
    assert kept[0] == "t99"
    assert (store.find("t0"), store.find("i0"), store.find("i99")) == (None, None, "t99")


def test_a_trace_larger_than_the_memory_is_not_kept() -> None:
    store = TraceStore(max_bytes=5_000)
    store.add([span(id_=str(number), name="n" * 200) for number in range(50)])
    assert list(store.recent(ALL)) == []


def test_a_trace_has_a_bound_of_spans() -> None:
    store = TraceStore()
    store.add([span(id_=str(number)) for number in range(MAX_SPANS + 3)])
    assert (len(store.spans("t1", ALL)), store.left_out("t1")) == (MAX_SPANS, 3)


def test_a_reader_sees_the_spans_of_functions_that_it_may_read() -> None:
    store = TraceStore()
    failed = SpanError("function_raised", "no")
    store.add([span(), span(id_="b", function="secret", start=0.0, end=9.0, error=failed)])
    assert [each.id for each in store.spans("t1", "f".__eq__)] == ["a"]
    (summary,) = store.recent("f".__eq__)
    assert (summary.name, summary.spans, summary.errors, summary.start, summary.end) == ("f", 1, 0, 1.0, 2.0)
    (whole,) = store.recent(ALL)
    assert (whole.name, whole.spans, whole.errors, whole.end) == ("secret", 2, 1, 9.0)
    assert list(store.recent("other".__eq__)) == []
