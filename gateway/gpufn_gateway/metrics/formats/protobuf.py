"""Prometheus' protobuf format, the only one in which Prometheus reads native histograms.

The exposition is a sequence of messages `io.prometheus.client.MetricFamily`, each after its length. They are written
here by hand, because a gateway without gRPC has no protobuf library. The tests read them with that library and with a
real Prometheus.

Source: `io/prometheus/client/metrics.proto` of https://github.com/prometheus/client_model
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

from gpufn_gateway.metrics.catalogue import Kind, Series
from gpufn_gateway.metrics.formats.format import Exemplars, Labels
from gpufn_gateway.metrics.histogram import BOUNDS, SCHEMA, ZERO_THRESHOLD, Exemplar, Histogram

_VARINT, _FIXED64, _LENGTH = 0, 1, 2  # wire types
_TYPES: Final = {Kind.COUNTER: 0, Kind.GAUGE: 1, Kind.UNKNOWN: 3, Kind.HISTOGRAM: 4}  # the enum MetricType
_VALUE_FIELDS: Final = {Kind.GAUGE: 2, Kind.COUNTER: 3, Kind.UNKNOWN: 5}  # of the message Metric
_HISTOGRAM_FIELD: Final = 7
_MAX_GAP: Final = 2  # empty buckets inside a span: a count of zero takes a byte, a new span at least six
_CLASSIC_BOUNDS: Final = (*BOUNDS, float("inf"))


class Protobuf:
    """Histograms are native and classic, and each classic bucket may have an exemplar."""

    content_type = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"

    def sample(self, series: Series, labels: Labels, value: float) -> bytes:
        return _metric(labels, _VALUE_FIELDS[series.kind], _double(1, float(value)))

    def histogram(self, series: Series, labels: Labels, histogram: Histogram, exemplars: Exemplars) -> bytes:
        cumulative = histogram.cumulative()
        fields = [_unsigned(1, cumulative[-1]), _double(2, histogram.total)]
        for number, (bound, count) in enumerate(zip(_CLASSIC_BOUNDS, cumulative, strict=True)):
            bucket = _unsigned(1, count) + _double(2, bound)
            if (exemplar := exemplars.get(number)) is not None:
                bucket += _bytes(3, _exemplar(exemplar))
            fields.append(_bytes(3, bucket))
        fields += _native(histogram)
        return _metric(labels, _HISTOGRAM_FIELD, b"".join(fields))

    def exposition(self, metrics: Iterable[tuple[Series, Sequence[bytes]]]) -> bytes:
        parts: list[bytes] = []
        for series, samples in metrics:
            head = _text(1, series.exposed_name) + _text(2, series.meaning) + _unsigned(3, _TYPES[series.kind])
            unit = _text(5, series.unit_in_name) if series.unit_in_name else b""
            family = b"".join((head, *(_bytes(4, sample) for sample in samples), unit))
            parts += _varint(len(family)), family
        return b"".join(parts)


def _metric(labels: Labels, field: int, value: bytes) -> bytes:
    return _label_pairs(labels) + _bytes(field, value)


def _label_pairs(labels: Labels) -> bytes:
    return b"".join([_bytes(1, _text(1, name) + _text(2, value)) for name, value in labels])


def _exemplar(exemplar: Exemplar) -> bytes:
    seconds, rest = divmod(exemplar.at, 1)
    at = _unsigned(1, int(seconds)) + _unsigned(2, int(rest * 1e9))
    return _label_pairs(exemplar.labels) + _double(2, exemplar.seconds) + _bytes(3, at)


def _native(histogram: Histogram) -> list[bytes]:
    """Return the fields of the native buckets. A span is a run of buckets after a gap, a count is stored as its
    difference from the count before."""
    zeros, counts = histogram.native()
    fields = [_signed(5, SCHEMA), _double(6, ZERO_THRESHOLD), _unsigned(7, zeros)]
    spans, end, before = _spans(counts), 0, 0
    for first, length in spans:
        fields.append(_bytes(12, _signed(1, first - end) + _unsigned(2, length)))
        end = first + length
    for first, length in spans:
        for number in range(first, first + length):
            count = counts.get(number, 0)
            fields.append(_signed(13, count - before))
            before = count
    return fields


def _spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return runs of buckets, as the first number and the length.

    >>> _spans([-3, -2, 0, 5])
    [(-3, 4), (5, 1)]
    """
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number - sum(spans[-1]) <= _MAX_GAP:
            spans[-1] = (spans[-1][0], number - spans[-1][0] + 1)
        else:
            spans.append((number, 1))
    return spans


# --- the encoding of https://protobuf.dev/programming-guides/encoding ------------------------------------------------


def _varint(number: int) -> bytes:
    """
    >>> _varint(1), _varint(300)
    (b'\\x01', b'\\xac\\x02')
    """
    if number < 128:
        return bytes((number,))
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _unsigned(field: int, number: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(number)


def _signed(field: int, number: int) -> bytes:
    return _unsigned(field, number << 1 if number >= 0 else (-number << 1) - 1)


def _double(field: int, number: float) -> bytes:
    return _varint(field << 3 | _FIXED64) + struct.pack("<d", number)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())
