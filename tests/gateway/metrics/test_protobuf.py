"""The protobuf format, read by the protobuf library and by a real Prometheus."""

from __future__ import annotations

import asyncio
import http.server
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.decoder import _DecodeVarint32

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.protocol.messages import ResultReply
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.formats.negotiation import format_for
from gpufn_gateway.metrics.formats.protobuf import Protobuf
from gpufn_gateway.metrics.formats.text import OpenMetrics, Text
from gpufn_gateway.metrics.histogram import SCHEMA, ZERO_THRESHOLD, Histogram
from gpufn_gateway.metrics.telemetry import Telemetry
from tests.e2e.prometheus import Prometheus
from tests.waiting import until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ACCEPT = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
_TYPES = descriptor_pb2.FieldDescriptorProto
# The fields of `io.prometheus.client` that the gateway writes: number, type, and whether it is repeated.
_MESSAGES: dict[str, dict[str, tuple[int, int | str, bool]]] = {
    "LabelPair": {"name": (1, _TYPES.TYPE_STRING, False), "value": (2, _TYPES.TYPE_STRING, False)},
    "Value": {"value": (1, _TYPES.TYPE_DOUBLE, False)},
    "Timestamp": {"seconds": (1, _TYPES.TYPE_INT64, False), "nanos": (2, _TYPES.TYPE_INT32, False)},
    "Exemplar": {
        "label": (1, "LabelPair", True), "value": (2, _TYPES.TYPE_DOUBLE, False), "timestamp": (3, "Timestamp", False),
    },
    "Bucket": {
        "cumulative_count": (1, _TYPES.TYPE_UINT64, False), "upper_bound": (2, _TYPES.TYPE_DOUBLE, False),
        "exemplar": (3, "Exemplar", False),
    },
    "BucketSpan": {"offset": (1, _TYPES.TYPE_SINT32, False), "length": (2, _TYPES.TYPE_UINT32, False)},
    "Histogram": {
        "sample_count": (1, _TYPES.TYPE_UINT64, False), "sample_sum": (2, _TYPES.TYPE_DOUBLE, False),
        "bucket": (3, "Bucket", True), "schema": (5, _TYPES.TYPE_SINT32, False),
        "zero_threshold": (6, _TYPES.TYPE_DOUBLE, False), "zero_count": (7, _TYPES.TYPE_UINT64, False),
        "positive_span": (12, "BucketSpan", True), "positive_delta": (13, _TYPES.TYPE_SINT64, True),
    },
    "Metric": {
        "label": (1, "LabelPair", True), "gauge": (2, "Value", False), "counter": (3, "Value", False),
        "untyped": (5, "Value", False), "histogram": (7, "Histogram", False),
    },
    "MetricFamily": {
        "name": (1, _TYPES.TYPE_STRING, False), "help": (2, _TYPES.TYPE_STRING, False),
        "type": (3, _TYPES.TYPE_INT32, False), "metric": (4, "Metric", True), "unit": (5, _TYPES.TYPE_STRING, False),
    },
}  # fmt: skip


def _family_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="metrics.proto", package="test.prometheus", syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, (number, kind, is_repeated) in fields.items():
            label = _TYPES.LABEL_REPEATED if is_repeated else _TYPES.LABEL_OPTIONAL
            field = described.field.add(name=name, number=number, label=label)
            if isinstance(kind, str):
                field.type, field.type_name = _TYPES.TYPE_MESSAGE, f".test.prometheus.{kind}"
            else:
                field.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test.prometheus.MetricFamily"))


FAMILY = _family_class()


def _read(exposition: bytes) -> dict[str, Any]:
    families, position = {}, 0
    while position < len(exposition):
        size, position = _DecodeVarint32(exposition, position)
        family = FAMILY.FromString(exposition[position : position + size])
        families[family.name] = family
        position += size
    return families


def _of(*durations: float) -> Histogram:
    histogram = Histogram()
    for seconds in durations:
        histogram.observe(seconds)
    return histogram


def _native_counts(read: Any) -> dict[int, int]:
    """Return the counts by the number of the bucket, without empty buckets."""
    counts, deltas, number, count = {}, iter(read.positive_delta), 0, 0
    for span in read.positive_span:
        number += span.offset
        for _ in range(span.length):
            count += next(deltas)
            counts[number] = count
            number += 1
    assert next(deltas, None) is None
    return {number: count for number, count in counts.items() if count}


def _telemetry() -> Telemetry:
    telemetry = Telemetry(lambda: 2)
    for milliseconds in range(1, 101):
        reply = ResultReply("01hz", OutcomeKind.SUCCEEDED, None, "", 1, 1, 0.0, 0.25)
        telemetry.of("f").count_end(reply, milliseconds / 1_000, 1_700_000_000.25, TRACE)
    return telemetry


async def test_a_client_that_accepts_protobuf_gets_every_sample_in_it() -> None:
    telemetry = _telemetry()
    body, content_type = await telemetry.scrape(ACCEPT)
    assert content_type.replace(" ", "") == ACCEPT
    families = _read(body)
    text, _ = await telemetry.scrape("")
    assert [line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")] == list(families)
    calls = families["gpufn_calls_total"]
    (succeeded,) = [each for each in calls.metric if each.label[1].value == "succeeded"]
    assert (calls.type, succeeded.counter.value) == (0, 100.0)
    assert [(each.name, each.value) for each in succeeded.label] == [("function", "f"), ("outcome", "succeeded")]
    in_flight = families["gpufn_calls_in_flight"]
    assert (in_flight.type, in_flight.metric[0].gauge.value) == (1, 2.0)
    latency = families["gpufn_call_seconds"]
    assert (latency.type, latency.unit, latency.metric[0].histogram.sample_count) == (4, "seconds", 100)
    assert latency.metric[0].histogram.sample_sum == pytest.approx(5.05)
    exemplar = latency.metric[0].histogram.bucket[6].exemplar  # up to 0.1 s
    assert (exemplar.value, exemplar.timestamp.seconds, exemplar.timestamp.nanos) == (0.1, 1_700_000_000, 250_000_000)
    assert {each.name: each.value for each in exemplar.label}["trace_id"] == TRACE.split("-")[1]


@pytest.mark.parametrize(
    "durations",
    [
        (),
        (0.0,),
        (ZERO_THRESHOLD, math.nextafter(ZERO_THRESHOLD, 1.0)),
        (1.0, math.nextafter(1.0, 2.0), math.nextafter(1.0, 0.0)),
        (0.001, 0.0025, 0.3, 0.3, 299.0, 301.0, 1e9),
        tuple(2.0 ** (number / 64) for number in range(-1_000, 1_000, 7)),
    ],
)
def test_the_native_buckets_hold_each_duration_once(durations: tuple[float, ...]) -> None:
    families = Families(Protobuf())
    families.add_histogram("gpufn_controller_step_seconds", _of(*durations))
    read = _read(families.exposition())["gpufn_controller_step_seconds"].metric[0].histogram
    assert (read.schema, read.zero_threshold) == (SCHEMA, ZERO_THRESHOLD)
    assert read.zero_count == sum(each <= ZERO_THRESHOLD for each in durations)
    expected: dict[int, int] = {}
    for seconds in durations:
        if seconds > ZERO_THRESHOLD:
            number = next((n for n in range(-136, 136) if seconds <= 2 ** (n / 8)), 136)
            expected[number] = expected.get(number, 0) + 1
    assert _native_counts(read) == expected
    classic = [(bucket.upper_bound, bucket.cumulative_count) for bucket in read.bucket]
    assert classic == [(bound, sum(each <= bound for each in durations)) for bound, _ in classic]
    assert (len(classic), classic[-1][0], read.sample_count) == (17, math.inf, len(durations))


def test_the_client_chooses_the_format() -> None:
    of_prometheus = (
        f"{ACCEPT};q=0.6,application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
        "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
    )
    cases = {
        of_prometheus: Protobuf,
        of_prometheus.replace("q=0.6", "q=0.1"): OpenMetrics,
        "text/plain;q=0.9,application/openmetrics-text;q=0.1": Text,
        f"{ACCEPT};q=0": Text,
        f"{ACCEPT};q=much": Text,
        "application/vnd.google.protobuf;proto=some.Other;encoding=delimited": Text,
        ACCEPT.replace("delimited", "text"): Text,
    }
    assert {accept: type(format_for(accept)) for accept in cases} == cases


@contextmanager
def _served(telemetry: Telemetry) -> Iterator[str]:
    class Scraped(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, content_type = asyncio.run(telemetry.scrape(self.headers["Accept"]))
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scraped) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_prometheus_reads_native_histograms(tmp_path: Path) -> None:
    with (
        _served(_telemetry()) as url,
        Prometheus(tmp_path, [url], features=("native-histograms", "exemplar-storage")) as prometheus,
    ):
        quantile = "histogram_quantile(0.9, gpufn_call_seconds)"
        until(lambda: prometheus.query(quantile), lambda: prometheus.client.get("targets").text)
        assert prometheus.value(quantile) == pytest.approx(0.09, rel=0.09)
        assert prometheus.value("histogram_count(gpufn_call_seconds)") == 100.0
        assert prometheus.value("histogram_sum(gpufn_call_seconds)") == pytest.approx(5.05)
        assert prometheus.value('gpufn_calls_total{outcome="succeeded"}') == 100.0
        (found,) = prometheus.client.get(
            "query_exemplars", params={"query": "gpufn_call_seconds", "start": 1_600_000_000, "end": 1_800_000_000}
        ).json()["data"]
        assert {each["labels"]["invocation"] for each in found["exemplars"]} == {"01hz"}
