"""Counters of this gateway, and the scrape. While the gateway leads, the scrape has figures of the platform too."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

from gpufn_gateway.history.collector import function_subject, revision_subject
from gpufn_gateway.history.fields import Points, merge
from gpufn_gateway.metrics.call_stats import OTHER, CallStats
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.formats.negotiation import format_for
from gpufn_gateway.metrics.histogram import Histogram, exemplar_of

MAX_FUNCTIONS: Final = 1_000  # with their own series at a gateway
OTHER_FUNCTIONS: Final = f"_{OTHER}"  # the name of all functions beyond it; no function can have it

Fill = Callable[[Families], None]


class Source(Protocol):
    """A part of the scrape. `snapshot` runs in the event loop, and only copies data that other code may change
    meanwhile. The function that it returns adds the samples, in a thread."""

    def snapshot(self) -> Fill: ...


class Telemetry:
    """CallStats of the functions. `in_flight` returns the number of calls that wait for a result. `leads` returns
    whether this gateway's controller leads; then the sources in `of_platform` are exposed too."""

    def __init__(self, in_flight: Callable[[], int], leads: Callable[[], bool] = lambda: True) -> None:
        self._in_flight = in_flight
        self._leads = leads
        self._functions: dict[str, CallStats] = {}
        self._own: set[str] = set()  # functions with their own series
        self._deleted = CallStats()  # of functions without
        self.of_gateway: list[Source] = []
        self.of_platform: list[Source] = []

    def of(self, function: str) -> CallStats:
        stats = self._functions.get(function)
        return self._add(function) if stats is None else stats

    def _add(self, function: str) -> CallStats:
        if len(self._own) < MAX_FUNCTIONS:
            self._own.add(function)
        stats = self._functions[function] = CallStats()
        return stats

    def forget(self, function: str) -> None:
        stats = self._functions.pop(function, None)
        if function in self._own:
            self._own.remove(function)
        elif stats is not None:
            self._deleted.add(stats)  # so that the counters of `_other` do not decrease

    def take_recent(self) -> Points:
        """Return the calls that were counted since the last time, for the history."""
        points: Points = {}
        for name, stats in self._functions.items():
            recent, stats.recent = stats.recent, {}
            for revision, point in recent.items():
                counted = {field: value for field, value in point.items() if value}
                if revision:
                    points[revision_subject(name, revision)] = counted
                merge(points.setdefault(function_subject(name), {}), counted)
        return points

    def latencies(self) -> Iterator[tuple[str, Histogram]]:
        """Yield each function with the latencies of its calls."""
        return ((name, stats.latency) for name, stats in self._functions.items())

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return the body and the content type for a client's `Accept`."""
        form = format_for(accept)
        return await asyncio.to_thread(_write, Families(form), self.snapshots()), form.content_type

    def snapshots(self) -> list[Fill]:
        sources: list[Source] = [self, *self.of_gateway, *(self.of_platform if self._leads() else ())]
        return [source.snapshot() for source in sources]

    def snapshot(self) -> Fill:
        own = [(name, stats) for name, stats in self._functions.items() if name in self._own]
        others = [stats for name, stats in self._functions.items() if name not in self._own]
        # The copy does not count a function of `others` that is deleted meanwhile.
        return functools.partial(_fill, self._in_flight(), own, others, self._deleted.copy())


def _fill(
    in_flight: int,
    own: Sequence[tuple[str, CallStats]],
    others: Sequence[CallStats],
    deleted: CallStats,
    families: Families,
) -> None:
    """Add the calls. They go on meanwhile: each counter is copied in one step of the interpreter. Changes `deleted`."""
    families.add("gpufn_calls_in_flight", in_flight)
    for name, stats in own:
        _add_calls(families, name, stats.copy())
    for stats in others:
        deleted.add(stats.copy())
    if any(deleted.outcomes.values()) or deleted.refusals:
        _add_calls(families, OTHER_FUNCTIONS, deleted)


def _add_calls(families: Families, name: str, stats: CallStats) -> None:
    add = families.add
    for metric, by_label in (
        ("gpufn_calls", stats.outcomes),
        ("gpufn_refusals", stats.refusals),
        ("gpufn_webhooks", stats.webhooks),
        ("gpufn_cold_start_seconds", stats.phase_seconds),
    ):
        for label, value in by_label.items():
            add(metric, value, name, str(label))
    exemplars = {bucket: exemplar_of(*call) for bucket, call in stats.exemplars.items()}
    families.add_histogram("gpufn_call_seconds", stats.latency, name, exemplars=exemplars)
    families.add_histogram("gpufn_queue_seconds", stats.queue, name)
    families.add_histogram("gpufn_run_seconds", stats.run, name)
    add("gpufn_cold_starts", stats.cold_starts, name)


def _write(families: Families, fills: Iterable[Fill]) -> bytes:
    for fill in fills:
        fill(families)
    families.add("gpufn_metrics_dropped_series", families.dropped)
    return families.exposition()
