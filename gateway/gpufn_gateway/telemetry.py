"""What the gateway counts. The hot path adds to plain integers; Prometheus families are made when somebody scrapes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.protocol.messages import ResultReply
from gpufn_core.protocol.reports import RunnerReport
from gpufn_gateway.calls.attempt_counts import Attempts

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
# Seconds, upper bounds.
_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PHASES: Final = ("place", "launch", "load", "warm", "resume")


class Histogram:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_BUCKETS, seconds)] += 1
        self.total += seconds

    def cumulated(self) -> list[tuple[str, float]]:
        bounds = [str(bound) for bound in _BUCKETS] + ["+Inf"]
        running = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip(bounds, self.counts, strict=True):
            running += count
            buckets.append((bound, running))
        return buckets


class CallStats:
    """One function's calls at this gateway."""

    __slots__ = (
        "cold_starts",
        "latency",
        "outcomes",
        "phase_seconds",
        "queue",
        "refusals",
        "run",
        "succeeded_s",
        "webhooks",
    )

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.refusals: dict[str, int] = {}
        self.latency = Histogram()
        self.succeeded_s = 0.0  # of the latency
        self.queue = Histogram()
        self.run = Histogram()
        self.webhooks: dict[str, int] = {}
        self.cold_starts = 0
        self.phase_seconds = dict.fromkeys(_PHASES, 0.0)

    def ended(self, reply: ResultReply, seconds: float) -> None:
        """`seconds` from the request to this reply."""
        seconds = max(0.0, seconds)  # of the wall clock, which may have been set back
        outcomes = self.outcomes
        outcomes[reply.kind] = outcomes.get(reply.kind, 0) + 1
        self.latency.observe(seconds)
        if reply.kind is OutcomeKind.SUCCEEDED:
            self.succeeded_s += seconds
        self.queue.observe(reply.queue_s)
        self.run.observe(reply.run_s)
        if (cold := reply.cold_start) is not None:
            self.cold_starts += 1
            for phase, took_s in cold.phases.items():
                self.phase_seconds[phase] += took_s

    def failed(self, code: str) -> None:
        """A call that ended without a reply."""
        self.outcomes[code] = self.outcomes.get(code, 0) + 1

    def refused(self, code: str) -> None:
        """A request that never became a call."""
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def told(self, outcome: str) -> None:
        """A webhook, or it was given up."""
        self.webhooks[outcome] = self.webhooks.get(outcome, 0) + 1


class Telemetry(Collector):
    """All functions' CallStats, and what their `attempts` on all nodes come to. `in_flight` tells the number of calls
    that wait right now; `runners` what the runners last reported, which every gateway shows alike."""

    def __init__(self, in_flight: Callable[[], int], runners: Callable[[], Iterable[RunnerReport]]) -> None:
        self._in_flight = in_flight
        self._runners = runners
        self._functions: dict[str, CallStats] = {}
        self.attempts = Attempts()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def of(self, function: str) -> CallStats:
        stats = self._functions.get(function)
        if stats is None:
            stats = self._functions[function] = CallStats()
        return stats

    def forget(self, function: str) -> None:
        self._functions.pop(function, None)
        self.attempts.forget(function)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("gpufn_calls_in_flight", "Calls that wait for a result", value=self._in_flight())
        calls = CounterMetricFamily(
            "gpufn_calls", "Calls that a client waited for, and that ended", labels=["function", "outcome"]
        )
        refusals = CounterMetricFamily("gpufn_refusals", "Requests refused", labels=["function", "code"])
        latency = HistogramMetricFamily("gpufn_call_seconds", "From request to result", labels=["function"])
        queue = HistogramMetricFamily("gpufn_queue_seconds", "From request to the start", labels=["function"])
        run = HistogramMetricFamily("gpufn_run_seconds", "From the start to the result", labels=["function"])
        webhooks = CounterMetricFamily("gpufn_webhooks", "Webhooks that ended", labels=["function", "outcome"])
        cold = CounterMetricFamily("gpufn_cold_starts", "Calls that met a new worker", labels=["function"])
        phases = CounterMetricFamily("gpufn_cold_start_seconds", "Where it went", labels=["function", "phase"])
        for name, stats in self._functions.items():
            for outcome, count in stats.outcomes.items():
                calls.add_metric([name, outcome], count)
            for code, count in stats.refusals.items():
                refusals.add_metric([name, code], count)
            for outcome, count in stats.webhooks.items():
                webhooks.add_metric([name, outcome], count)
            latency.add_metric([name], stats.latency.cumulated(), stats.latency.total)
            queue.add_metric([name], stats.queue.cumulated(), stats.queue.total)
            run.add_metric([name], stats.run.cumulated(), stats.run.total)
            cold.add_metric([name], stats.cold_starts)
            for phase, seconds in stats.phase_seconds.items():
                phases.add_metric([name, phase], seconds)
        dropped = CounterMetricFamily(
            "gpufn_dropped_outcomes", "Ends of submitted calls that had ended already", labels=["node"]
        )
        for report in self._runners():
            dropped.add_metric([report.node], report.dropped_outcomes)
        yield from (calls, refusals, latency, queue, run, cold, phases, webhooks, dropped)
        yield from self._attempted()

    def _attempted(self) -> Iterator[Metric]:
        """Of every call, also those that are submitted, that maps make and that functions make of each other."""
        labels = ["node", "function"]
        ended = CounterMetricFamily("gpufn_attempts", "Attempts that ended, of any call", labels=labels)
        failed = CounterMetricFamily("gpufn_attempts_failed", "Those that did not succeed", labels=labels)
        run = CounterMetricFamily("gpufn_attempts_seconds", "How long they ran", labels=labels)
        gpu = CounterMetricFamily("gpufn_gpu_seconds", "GPU seconds that calls are charged", labels=labels)
        for node, function, counts in self.attempts:
            ended.add_metric([node, function], counts.ended)
            failed.add_metric([node, function], counts.failed)
            run.add_metric([node, function], counts.run_s)
            if counts.gpu_s:
                gpu.add_metric([node, function], counts.gpu_s)
        yield from (ended, failed, run, gpu)
