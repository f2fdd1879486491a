"""The samples of one scrape, by the names of the catalogue, as lines of the exposition.

A scrape of 200 functions and 16 GPUs has 20,000 samples. prometheus_client takes 0.4 s to write them, which other
requests would feel; the lines here take a tenth of it (`benchmarks/scrape.py`). Its parser reads them in the tests.

Every label is bounded here, because nodes and callers choose some values. Samples beyond a bound are counted, not
written.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from gpufn_gateway.metrics.catalogue import SERIES, Kind
from gpufn_gateway.metrics.histogram import Bucket, Exemplar, Histogram

MAX_SAMPLES: Final = 20_000  # per metric; a histogram has 19 per series
MAX_ALL_SAMPLES: Final = 150_000  # per scrape
MAX_LABEL_CHARS: Final = 200
_UNITS: Final = ("seconds", "bytes", "ratio", "celsius", "watts", "joules", "hertz")  # these end a name
_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


class Families:
    """`openmetrics`: write that format, otherwise Prometheus' text format."""

    def __init__(self, *, openmetrics: bool = False) -> None:
        self._openmetrics = openmetrics
        self._lines: dict[str, list[str]] = {}
        self._count = 0
        self.dropped = 0

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample, with the labels in the catalogue's order. An unknown value, None, is omitted."""
        if value is None or (lines := self._room(name, 1)) is None:
            return
        series = SERIES[name]
        own = _labels(series.labels, labels)
        lines.append(
            f"{series.exposed_name}{{{own}}} {float(value)}" if own else f"{series.exposed_name} {float(value)}"
        )

    def add_histogram(self, name: str, histogram: Histogram, *labels: str, buckets: Sequence[Bucket] = ()) -> None:
        """Add a histogram. `buckets` are its own, with exemplars."""
        buckets = buckets or histogram.cumulative()
        if (lines := self._room(name, len(buckets) + 2)) is None:
            return
        own = _labels(SERIES[name].labels, labels)
        before = f"{name}_bucket{{{own},le=" if own else f"{name}_bucket{{le="
        for bound, count, exemplar in buckets:
            line = f'{before}"{bound}"}} {count}'
            lines.append(f"{line}{_exemplar(exemplar)}" if exemplar is not None and self._openmetrics else line)
        in_braces = f"{{{own}}}" if own else ""
        lines.append(f"{name}_count{in_braces} {buckets[-1][1]}")
        lines.append(f"{name}_sum{in_braces} {float(histogram.total)}")

    def lines(self, name: str) -> list[str]:
        """Return the samples of a metric."""
        return self._lines.get(name, [])

    def text(self) -> bytes:
        """Return the exposition, in the catalogue's order."""
        parts: list[str] = []
        for name in SERIES:
            if lines := self._lines.get(name):
                parts += self._head(name), *lines
        parts.append("# EOF\n" if self._openmetrics else "")
        return "\n".join(parts).encode()

    def _head(self, name: str) -> str:
        series = SERIES[name]
        if not self._openmetrics:
            kind = "untyped" if series.kind is Kind.UNKNOWN else series.kind.value
            shown = series.exposed_name
            return f"# HELP {shown} {series.meaning}\n# TYPE {shown} {kind}"
        head = f"# HELP {name} {series.meaning.translate(_ESCAPES)}\n# TYPE {name} {series.kind.value}"
        has_unit = series.unit in _UNITS and name.endswith(f"_{series.unit}")
        return f"{head}\n# UNIT {name} {series.unit}" if has_unit else head

    def _room(self, name: str, samples: int) -> list[str] | None:
        """Return the lines of a metric, if it may have more samples; None beyond the bounds."""
        lines = self._lines.setdefault(name, [])
        if len(lines) + samples > MAX_SAMPLES or self._count + samples > MAX_ALL_SAMPLES:
            self.dropped += 1
            return None
        self._count += samples
        return lines


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Write the labels by their names, as other exporters do."""
    if len(names) != len(values):
        raise ValueError(f"there are {len(names)} labels, not {len(values)}")
    return ",".join(
        f'{names[index]}="{values[index][:MAX_LABEL_CHARS].translate(_ESCAPES)}"' for index in _order(names)
    )


@functools.cache
def _order(names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(names)), key=names.__getitem__))


def _exemplar(exemplar: Exemplar) -> str:
    labels = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in exemplar.labels)
    return f" # {{{labels}}} {exemplar.seconds} {exemplar.at}"
