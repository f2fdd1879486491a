"""Counters of one function's calls at this gateway. The hot path adds to plain integers."""

from __future__ import annotations

from collections import Counter
from typing import Final

from gpufn_core.domain.invocation import OutcomeKind
from gpufn_core.protocol.messages import ResultReply
from gpufn_gateway.history.durations import bucket_of
from gpufn_gateway.history.fields import Field, Point, add_count
from gpufn_gateway.metrics.histogram import Histogram, Traced

MAX_CODES: Final = 64  # different codes of one function; the rest counts as `other`
OTHER: Final = "other"
PHASES: Final = ("place", "fetch", "launch", "load", "warm", "resume")
_BY_LABEL: Final = ("outcomes", "refusals", "webhooks", "phase_seconds")
_HISTOGRAMS: Final = ("latency", "queue", "run")
_LATENCY, _QUEUE_TIME = int(Field.LATENCY), int(Field.QUEUE_TIME)
_EXPECTED: Final = (OutcomeKind.SUCCEEDED, OutcomeKind.RAISED, OutcomeKind.TIMED_OUT, OutcomeKind.LOST)
_SUCCEEDED: Final = OutcomeKind.SUCCEEDED  # each call needs it, and Python looks up a member of an enum slowly


class CodeCounts(Counter[str]):
    """Counts by code. Their number is bounded: a code may come from another process."""

    def count(self, code: str) -> None:
        self[code if code in self or len(self) < MAX_CODES else OTHER] += 1


class CallStats:
    def __init__(self) -> None:
        # Zeros, so that Prometheus sees the first of each as an increase.
        self.outcomes = CodeCounts(dict.fromkeys(map(str, _EXPECTED), 0))
        self.refusals = CodeCounts()
        self.latency = Histogram()
        self.exemplars: dict[int, Traced] = {}  # the last call in each bucket of the latency
        self.succeeded_s = 0.0  # total latency of successful calls
        self.queue = Histogram()
        self.run = Histogram()
        self.webhooks: Counter[str] = Counter()
        self.cold_starts = 0
        self.recent: dict[int, Point] = {}  # for the history, by revision; 0 if it is unknown
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)

    def copy(self) -> CallStats:
        """Return a copy that does not change, for a scrape."""
        twin = CallStats()
        for name in _BY_LABEL:
            setattr(twin, name, dict(getattr(self, name)))
        for name in _HISTOGRAMS:
            setattr(twin, name, getattr(self, name).copy())
        twin.exemplars = dict(self.exemplars)
        twin.cold_starts = self.cold_starts
        return twin

    def add(self, other: CallStats) -> None:
        """Add the counters of another function."""
        for name in _BY_LABEL:
            counts = getattr(self, name)
            for label, count in getattr(other, name).items():
                counts[label] = counts.get(label, 0) + count
        for name in _HISTOGRAMS:
            getattr(self, name).add(getattr(other, name))
        self.cold_starts += other.cold_starts

    def count_end(self, reply: ResultReply, seconds: float, ended_at: float, trace: str = "") -> None:
        """Count a call that ended `ended_at`, in unix seconds; `seconds` from the request to this reply. `trace` is the
        caller's `traceparent`."""
        seconds = max(0.0, seconds)  # the wall clock may have been set back
        self.outcomes[reply.kind] += 1
        bucket = self.latency.observe(seconds)
        self.exemplars[bucket] = (reply.invocation, trace, seconds, ended_at)
        if reply.kind is _SUCCEEDED:
            self.succeeded_s += seconds
        self.queue.observe(reply.queue_s)
        self.run.observe(reply.run_s)
        recent = self.recent.get(reply.revision) or self._recent_of(reply.revision)
        for buckets, duration_s in ((recent[_LATENCY], seconds), (recent[_QUEUE_TIME], reply.queue_s)):
            number = bucket_of(duration_s)
            buckets[number] = buckets.get(number, 0) + 1
        if reply.kind is not _SUCCEEDED:
            add_count(recent, Field.ERRORS, reply.kind.value if reply.error is None else reply.error.code)
        if (cold := reply.cold_start) is not None:
            self.cold_starts += 1
            for phase, phase_s in cold.phases.items():
                self.phase_seconds[phase] += phase_s

    def count_failure(self, code: str) -> None:
        """Count a call that ended without a reply."""
        self.outcomes.count(code)
        add_count(self._recent_of(0), Field.ERRORS, code or "unknown")

    def count_refusal(self, code: str) -> None:
        """Count a request that was rejected before it became a call."""
        self.refusals.count(code)
        add_count(self._recent_of(0), Field.REFUSALS, code)

    def _recent_of(self, revision: int) -> Point:
        if (recent := self.recent.get(revision)) is None:
            recent = self.recent[revision] = {_LATENCY: {}, _QUEUE_TIME: {}}
        return recent

    def count_webhook(self, outcome: str) -> None:
        """Count a webhook that was delivered or given up."""
        self.webhooks[outcome] += 1
