"""The expected time of a start on a node, in seconds: its missing weights, and the duration of its last start. Pure.

Nodes with the same expected time, to the second, are equal: then the tighter fit decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from gpufn_core.protocol.reports import NodeReport

_FETCH_BYTES_PER_S: Final = 200e6  # of a node that has not fetched anything yet


class StartTimes(msgspec.Struct, frozen=True):
    """The weights of a revision, as bytes by digest, and the seconds of its last start on each node, without fetches.
    `typical_s` is for the other nodes.

    >>> times = StartTimes(by_node={"a": 7.0}, typical_s=2.4)
    >>> [times.on(NodeReport(node, 0.0, ())) for node in ("a", "b")]
    [7, 2]
    """

    weights: Mapping[str, int] = {}
    by_node: Mapping[str, float] = {}
    typical_s: float = 0.0

    def on(self, report: NodeReport) -> int:
        """Return the expected seconds on this node."""
        start_s = self.by_node.get(report.node, self.typical_s)
        if self.weights:
            start_s += _missing_bytes(self.weights, report) / (report.weights.bytes_per_s or _FETCH_BYTES_PER_S)
        return round(start_s)


def _missing_bytes(weights: Mapping[str, int], report: NodeReport) -> int:
    fetched = {fetch.digest: fetch.done_bytes for fetch in report.weights.fetches}
    return sum(
        size - min(size, fetched.get(digest, 0))
        for digest, size in weights.items()
        if digest not in report.weights.complete
    )
