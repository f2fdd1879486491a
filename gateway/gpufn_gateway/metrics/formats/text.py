"""Prometheus' text format, and OpenMetrics 1.0.

A scrape of 200 functions and 16 GPUs has 20,000 samples. prometheus_client takes 0.4 s to write them, which other
requests would feel; the lines here take a tenth of it (`benchmarks/scrape.py`). Its parser reads them in the tests.

Sources: https://prometheus.io/docs/instrumenting/exposition_formats/,
https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from gpufn_gateway.metrics.catalogue import Kind, Series
from gpufn_gateway.metrics.formats.format import Exemplars, Labels
from gpufn_gateway.metrics.histogram import BOUNDS, Exemplar, Histogram

_BOUND_NAMES: Final = (*map(str, BOUNDS), "+Inf")
_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


class Text:
    """Histograms are classic and without exemplars."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"
    _has_exemplars = False
    _end = b""

    def sample(self, series: Series, labels: Labels, value: float) -> bytes:
        own = f"{{{_labels(labels)}}}" if labels else ""
        return f"{series.exposed_name}{own} {float(value)}\n".encode()

    def histogram(self, series: Series, labels: Labels, histogram: Histogram, exemplars: Exemplars) -> bytes:
        own, name = _labels(labels), series.name
        before = f"{name}_bucket{{{own},le=" if own else f"{name}_bucket{{le="
        lines: list[str] = []
        cumulative = histogram.cumulative()
        for number, (bound, count) in enumerate(zip(_BOUND_NAMES, cumulative, strict=True)):
            line = f'{before}"{bound}"}} {count}'
            has_exemplar = self._has_exemplars and number in exemplars
            lines.append(f"{line}{_exemplar(exemplars[number])}" if has_exemplar else line)
        in_braces = f"{{{own}}}" if own else ""
        lines.append(f"{name}_count{in_braces} {cumulative[-1]}")
        lines.append(f"{name}_sum{in_braces} {float(histogram.total)}")
        return "\n".join((*lines, "")).encode()

    def exposition(self, metrics: Iterable[tuple[Series, Sequence[bytes]]]) -> bytes:
        parts: list[bytes] = []
        for series, lines in metrics:
            parts += self._head(series).encode(), *lines
        parts.append(self._end)
        return b"".join(parts)

    def _head(self, series: Series) -> str:
        kind = "untyped" if series.kind is Kind.UNKNOWN else series.kind.value
        name = series.exposed_name
        return f"# HELP {name} {series.meaning}\n# TYPE {name} {kind}\n"


class OpenMetrics(Text):
    """Histograms are classic, and each bucket may have an exemplar."""

    content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    _has_exemplars = True
    _end = b"# EOF\n"

    def _head(self, series: Series) -> str:
        name = series.name
        head = f"# HELP {name} {series.meaning.translate(_ESCAPES)}\n# TYPE {name} {series.kind.value}\n"
        return f"{head}# UNIT {name} {series.unit_in_name}\n" if series.unit_in_name else head


def _labels(labels: Labels) -> str:
    return ",".join([f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels])


def _exemplar(exemplar: Exemplar) -> str:
    return f" # {{{_labels(exemplar.labels)}}} {exemplar.seconds} {exemplar.at}"
