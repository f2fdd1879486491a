"""The expected time of a start on a node, in seconds: its missing weights, and the duration of its last start. Pure.

Nodes with the same expected time, to the second, are equal: then the tighter fit decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from gpufn_core.protocol.reports import WeightsReport

_FETCH_BYTES_PER_S: Final = 200e6  # for a node without fetches so far
_LONGEST_S: Final = 86_400.0  # a node may report anything
_NO_WEIGHTS: Final = WeightsReport()


class StartTimes(msgspec.Struct, frozen=True):
    """The weights of a revision, as bytes by digest, and the seconds of its last start on each node, without fetches.
    `typical_s` is for the other nodes, and `stored` has the last report of each node.

    >>> times = StartTimes(by_node={"a": 7.0}, typical_s=2.4)
    >>> times.on("a"), times.on("b")
    (7, 2)
    """

    weights: Mapping[str, int] = {}
    stored: Mapping[str, WeightsReport] = {}
    by_node: Mapping[str, float] = {}
    typical_s: float = 0.0

    def on(self, node: str) -> int:
        """Return the expected seconds on this node."""
        start_s = self.by_node.get(node, self.typical_s)
        if self.weights:
            stored = self.stored.get(node, _NO_WEIGHTS)
            start_s += self._missing_bytes(stored) / _fetch_rate(stored)
        return round(min(start_s, _LONGEST_S))

    def _missing_bytes(self, stored: WeightsReport) -> int:
        fetched = {fetch.digest: fetch.done_bytes for fetch in stored.fetches}
        return sum(
            max(0, size - max(0, fetched.get(digest, 0)))
            for digest, size in self.weights.items()
            if digest not in stored.complete
        )


def _fetch_rate(stored: WeightsReport) -> float:
    """Return bytes per second."""
    rate = stored.bytes_per_s
    return rate if rate is not None and math.isfinite(rate) and rate >= 1.0 else _FETCH_BYTES_PER_S
