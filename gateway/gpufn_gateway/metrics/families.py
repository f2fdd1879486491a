"""The samples of one scrape, by the names of the catalogue.

Every label is bounded here, because nodes and callers choose some values. Samples beyond a bound are counted, not
written.
"""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import Final

from gpufn_gateway.metrics.catalogue import SERIES
from gpufn_gateway.metrics.formats.format import Exemplars, Format, Labels
from gpufn_gateway.metrics.formats.negotiation import TEXT
from gpufn_gateway.metrics.histogram import BOUNDS, Histogram

MAX_SAMPLES: Final = 20_000  # per metric
MAX_ALL_SAMPLES: Final = 150_000  # per scrape
MAX_LABEL_CHARS: Final = 200
_NONE: Final[Exemplars] = MappingProxyType({})
_OF_A_HISTOGRAM: Final = len(BOUNDS) + 3  # samples: the buckets, one of them without a bound; the sum and the count


class Families:
    def __init__(self, form: Format = TEXT) -> None:
        self._form = form
        self._parts: dict[str, list[bytes]] = {}
        self._sizes: dict[str, int] = {}  # samples
        self._count = 0
        self.dropped = 0

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample, with the labels in the catalogue's order. An unknown value, None, is omitted."""
        if value is None or (parts := self._room(name, 1)) is None:
            return
        series = SERIES[name]
        parts.append(self._form.sample(series, _bounded(series.labels, labels), value))

    def add_histogram(self, name: str, histogram: Histogram, *labels: str, exemplars: Exemplars = _NONE) -> None:
        if (parts := self._room(name, _OF_A_HISTOGRAM)) is None:
            return
        series = SERIES[name]
        parts.append(self._form.histogram(series, _bounded(series.labels, labels), histogram, exemplars))

    def exposition(self) -> bytes:
        """Return all metrics, in the catalogue's order."""
        return self._form.exposition((SERIES[name], parts) for name in SERIES if (parts := self._parts.get(name)))

    def _room(self, name: str, samples: int) -> list[bytes] | None:
        """Return the parts of a metric, if it may have more samples; None beyond the bounds."""
        size = self._sizes.get(name, 0) + samples
        if size > MAX_SAMPLES or self._count + samples > MAX_ALL_SAMPLES:
            self.dropped += 1
            return None
        self._sizes[name] = size
        self._count += samples
        return self._parts.setdefault(name, [])


def _bounded(names: tuple[str, ...], values: tuple[str, ...]) -> Labels:
    """Return the labels by their names, as other exporters do."""
    if len(names) != len(values):
        raise ValueError(f"there are {len(names)} labels, not {len(values)}")
    return [(names[index], values[index][:MAX_LABEL_CHARS]) for index in _order(names)]


@functools.cache
def _order(names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(names)), key=names.__getitem__))
