"""The choice of a format by a client's `Accept`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpufn_gateway.metrics.formats.format import Format
from gpufn_gateway.metrics.formats.protobuf import Protobuf
from gpufn_gateway.metrics.formats.text import OpenMetrics, Text

TEXT: Final = Text()
_OPENMETRICS: Final = OpenMetrics()
_PROTOBUF: Final = Protobuf()


def format_for(accept: str) -> Format:
    """Return the format that a client prefers. Text is for all that accept neither protobuf nor OpenMetrics.

    >>> def chosen(accept):
    ...     return type(format_for(accept)).__name__
    >>> chosen("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1")
    'OpenMetrics'
    >>> chosen("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,*/*;q=0.1")
    'Protobuf'
    >>> chosen("*/*"), chosen("application/openmetrics-text; version=2.0.0")
    ('Text', 'Text')
    """
    best: Format = TEXT
    best_quality = 0.0
    for part in accept.split(","):
        kind, *parameters = (token.strip().lower().replace(" ", "") for token in part.split(";"))
        named = dict(parameter.partition("=")[::2] for parameter in parameters)
        quality = _quality(named)
        if quality > best_quality and (offered := _format(kind, named)) is not None:
            best, best_quality = offered, quality
    return best


def _format(kind: str, parameters: Mapping[str, str]) -> Format | None:
    if kind == "application/vnd.google.protobuf":
        message, encoding = parameters.get("proto", "").strip('"'), parameters.get("encoding", "").strip('"')
        return _PROTOBUF if (message, encoding) == ("io.prometheus.client.metricfamily", "delimited") else None
    if kind == "application/openmetrics-text":
        return _OPENMETRICS if parameters.get("version", "1.0.0").strip('"') in {"0.0.1", "1.0.0"} else None
    return TEXT if kind == "text/plain" else None


def _quality(parameters: Mapping[str, str]) -> float:
    try:
        return float(parameters.get("q", "1"))
    except ValueError:
        return 0.0
