"""The interface of a format of `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from gpufn_gateway.metrics.catalogue import Series
from gpufn_gateway.metrics.histogram import Exemplar, Histogram

Labels = Sequence[tuple[str, str]]
Exemplars = Mapping[int, Exemplar]  # by the number of the classic bucket


class Format(Protocol):
    """A metric becomes a list of parts; the exposition joins the parts of all metrics."""

    @property
    def content_type(self) -> str: ...

    def sample(self, series: Series, labels: Labels, value: float) -> bytes: ...

    def histogram(self, series: Series, labels: Labels, histogram: Histogram, exemplars: Exemplars) -> bytes: ...

    def exposition(self, metrics: Iterable[tuple[Series, Sequence[bytes]]]) -> bytes: ...
