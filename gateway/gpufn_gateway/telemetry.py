"""Metrics of the gateway. The hot path adds to plain integers; a scrape builds the Prometheus families."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.reports import NodeReport, RunnerReport
from gpufn_gateway.calls.attempt_counts import AttemptTotals
from gpufn_gateway.history.collector import function_subject, revision_subject
from gpufn_gateway.history.durations import bucket_of
from gpufn_gateway.history.fields import Field, Point, Points, add_count, merge

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Seconds, upper bounds.
BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PHASES: Final = ("place", "fetch", "launch", "load", "warm", "resume")
_LATENCY, _QUEUE_TIME = int(Field.LATENCY), int(Field.QUEUE_TIME)
_SUCCEEDED: Final = OutcomeKind.SUCCEEDED  # each call needs it, and Python looks up a member of an enum slowly


class Histogram:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        bounds = [*map(str, BUCKETS), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self.counts), strict=True))


class CallStats:
    """Counters of one function's calls at this gateway."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.latency = Histogram()
        self.succeeded_s = 0.0  # total latency of successful calls
        self.queue = Histogram()
        self.run = Histogram()
        self.webhooks: Counter[str] = Counter()
        self.cold_starts = 0
        self.recent: dict[int, Point] = {}  # for the history, by revision; 0 if it is unknown
        self.phase_seconds = dict.fromkeys(_PHASES, 0.0)

    def count_end(self, reply: ResultReply, seconds: float) -> None:
        """Count a call that ended; `seconds` from the request to this reply."""
        seconds = max(0.0, seconds)  # the wall clock may have been set back
        self.outcomes[reply.kind] += 1
        self.latency.observe(seconds)
        if reply.kind is _SUCCEEDED:
            self.succeeded_s += seconds
        self.queue.observe(reply.queue_s)
        self.run.observe(reply.run_s)
        recent = self._recent_of(reply.revision)
        for buckets, duration_s in ((recent[_LATENCY], seconds), (recent[_QUEUE_TIME], reply.queue_s)):
            bucket = bucket_of(duration_s)
            buckets[bucket] = buckets.get(bucket, 0) + 1
        if reply.kind is not _SUCCEEDED:
            add_count(recent, Field.ERRORS, reply.kind.value if reply.error is None else reply.error.code)
        if (cold := reply.cold_start) is not None:
            self.cold_starts += 1
            for phase, phase_s in cold.phases.items():
                self.phase_seconds[phase] += phase_s

    def count_failure(self, code: str) -> None:
        """Count a call that ended without a reply."""
        self.outcomes[code] += 1
        add_count(self._recent_of(0), Field.ERRORS, code or "unknown")

    def count_refusal(self, code: str) -> None:
        """Count a request that was rejected before it became a call."""
        self.refusals[code] += 1
        add_count(self._recent_of(0), Field.REFUSALS, code)

    def _recent_of(self, revision: int) -> Point:
        if (recent := self.recent.get(revision)) is None:
            recent = self.recent[revision] = {_LATENCY: {}, _QUEUE_TIME: {}}
        return recent

    def count_webhook(self, outcome: str) -> None:
        """Count a webhook that was delivered or given up."""
        self.webhooks[outcome] += 1


class Telemetry(Collector):
    """CallStats of all functions, and the totals of their `attempts` on all nodes.

    `in_flight` returns the number of calls that wait for a result. `runners` and `nodes` return the latest reports,
    which are the same at every gateway.
    """

    def __init__(
        self,
        in_flight: Callable[[], int],
        runners: Callable[[], Iterable[RunnerReport]],
        nodes: Callable[[], Iterable[NodeReport]],
    ) -> None:
        self._in_flight = in_flight
        self._runners = runners
        self._nodes = nodes
        self._functions: defaultdict[str, CallStats] = defaultdict(CallStats)
        self.attempts = AttemptTotals()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def of(self, function: str) -> CallStats:
        return self._functions[function]

    def forget(self, function: str) -> None:
        self._functions.pop(function, None)
        self.attempts.forget(function)

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

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("gpufn_calls_in_flight", "Calls that wait for a result", value=self._in_flight())
        calls = CounterMetricFamily(
            "gpufn_calls", "Ended calls that a client waited for", labels=["function", "outcome"]
        )
        refusals = CounterMetricFamily("gpufn_refusals", "Rejected requests", labels=["function", "code"])
        latency = HistogramMetricFamily("gpufn_call_seconds", "Time from request to result", labels=["function"])
        queue = HistogramMetricFamily("gpufn_queue_seconds", "Time from request to start", labels=["function"])
        run = HistogramMetricFamily("gpufn_run_seconds", "Time from start to result", labels=["function"])
        webhooks = CounterMetricFamily(
            "gpufn_webhooks", "Webhooks that were delivered or given up", labels=["function", "outcome"]
        )
        cold = CounterMetricFamily("gpufn_cold_starts", "Calls that waited for a cold start", labels=["function"])
        phases = CounterMetricFamily(
            "gpufn_cold_start_seconds", "Time spent in cold starts, by phase", labels=["function", "phase"]
        )
        for name, stats in self._functions.items():
            for counter, by_label in (
                (calls, stats.outcomes),
                (refusals, stats.refusals),
                (webhooks, stats.webhooks),
                (phases, stats.phase_seconds),
            ):
                for label, value in by_label.items():
                    counter.add_metric([name, label], value)
            for family, histogram in ((latency, stats.latency), (queue, stats.queue), (run, stats.run)):
                family.add_metric([name], histogram.cumulative(), histogram.total)
            cold.add_metric([name], stats.cold_starts)
        dropped = CounterMetricFamily(
            "gpufn_dropped_outcomes", "Outcomes dropped because the submitted call had already ended", labels=["node"]
        )
        for report in self._runners():
            dropped.add_metric([report.node], report.dropped_outcomes)
        yield from (calls, refusals, latency, queue, run, cold, phases, webhooks, dropped)
        yield from self._attempt_metrics()
        yield from self._weights_metrics()

    def _attempt_metrics(self) -> Iterator[Metric]:
        """Metrics of all attempts, including submitted calls, map items and calls between functions."""
        labels = ["node", "function"]
        ended = CounterMetricFamily("gpufn_attempts", "Ended attempts of any call", labels=labels)
        failed = CounterMetricFamily("gpufn_attempts_failed", "Attempts that did not succeed", labels=labels)
        run = CounterMetricFamily("gpufn_attempts_seconds", "Run time of attempts", labels=labels)
        gpu = CounterMetricFamily("gpufn_gpu_seconds", "GPU seconds charged to calls", labels=labels)
        for node, function, counts in self.attempts:
            ended.add_metric([node, function], counts.ended)
            failed.add_metric([node, function], counts.failed)
            run.add_metric([node, function], counts.run_s)
            if counts.gpu_s:
                gpu.add_metric([node, function], counts.gpu_s)
        yield from (ended, failed, run, gpu)

    def _weights_metrics(self) -> Iterator[Metric]:
        """Metrics of the weights on each node's disk."""
        starts = CounterMetricFamily(
            "gpufn_weights_starts", "Starts with weights, by whether the node had them", labels=["node", "result"]
        )
        fetched = CounterMetricFamily("gpufn_weights_fetched_bytes", "Fetched bytes of weights", labels=["node"])
        evicted = CounterMetricFamily("gpufn_weights_evicted_bytes", "Weights removed to make room", labels=["node"])
        stored = GaugeMetricFamily("gpufn_weights_stored_bytes", "Weights on the disk", labels=["node"])
        for report in self._nodes():
            weights = report.weights
            starts.add_metric([report.node, "hit"], weights.hits)
            starts.add_metric([report.node, "miss"], weights.misses)
            fetched.add_metric([report.node], weights.fetched_bytes)
            evicted.add_metric([report.node], weights.evicted_bytes)
            stored.add_metric([report.node], weights.stored_bytes)
        yield from (starts, fetched, evicted, stored)
