"""Figures of the platform, from the world of the controller that leads and from the reports of runners and nodes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gpufn_core.domain.devices.engine import Build, BuildState
from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol.reports import FunctionTotals, NodeReport, RunnerReport, TotalsReport
from gpufn_gateway.controller.loop import Controller
from gpufn_gateway.controller.state.views import NodeView
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.metrics.call_stats import PHASES
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.fragmentation import fragmentation
from gpufn_gateway.metrics.telemetry import Fill
from gpufn_platform.process.clock import Clock

_MAX_FUNCTIONS: Final = 1_000
_MAX_SPLIT_FUNCTIONS: Final = 100  # with up to 10 revisions on each node
_STATES: Final = ("up", "silent", "gone")


class ReportSeries:
    """Counters of the nodes, as their agents and runners report them."""

    def __init__(
        self,
        nodes: Callable[[], Iterable[NodeReport]],
        runners: Callable[[], Iterable[RunnerReport]],
        totals: Callable[[], Iterable[TotalsReport]],
        split_functions: Callable[[], Sequence[str]],
    ) -> None:
        self._nodes = nodes
        self._runners = runners
        self._totals = totals
        self._split_functions = split_functions

    def snapshot(self) -> Fill:
        nodes, runners, totals = list(self._nodes()), list(self._runners()), list(self._totals())
        split = self._split_functions()

        def fill(families: Families) -> None:
            _add_reports(families, nodes, runners, totals)
            _add_revisions(families, runners, frozenset(split[:_MAX_SPLIT_FUNCTIONS]))
            families.dropped += max(0, len(split) - _MAX_SPLIT_FUNCTIONS)

        return fill


def _add_reports(
    families: Families,
    nodes: Iterable[NodeReport],
    runners: Iterable[RunnerReport],
    totals: Iterable[TotalsReport],
) -> None:
    add = families.add
    for runner in runners:
        add("gpufn_dropped_outcomes", runner.dropped_outcomes, runner.node)
    for report in totals:
        add("gpufn_log_dropped_lines", report.dropped_log_lines, report.node)
        for each in report.functions[:_MAX_FUNCTIONS]:
            _add_totals(families, report.node, each)
        families.dropped += max(0, len(report.functions) - _MAX_FUNCTIONS)
    for node in nodes:
        weights = node.weights
        add("gpufn_weights_starts", weights.hits, node.node, "hit")
        add("gpufn_weights_starts", weights.misses, node.node, "miss")
        add("gpufn_weights_fetched_bytes", weights.fetched_bytes, node.node)
        add("gpufn_weights_evicted_bytes", weights.evicted_bytes, node.node)
        add("gpufn_weights_stored_bytes", weights.stored_bytes, node.node)


def _add_revisions(families: Families, runners: Iterable[RunnerReport], split: frozenset[str]) -> None:
    """Add the counters of the revisions of split functions. A queue counts from zero when its revision gets workers on
    the node again."""
    for runner in runners:
        for each in runner.traffic:
            if each.function in split:
                labels = runner.node, each.function, str(each.revision)
                families.add("gpufn_revision_attempts", each.ended, *labels)
                families.add("gpufn_revision_attempts_failed", each.failed, *labels)
                families.add("gpufn_revision_attempts_seconds", each.run_seconds, *labels)


def _add_totals(families: Families, node: str, each: FunctionTotals) -> None:
    add, labels = families.add, (node, each.function)
    add("gpufn_attempts", each.attempts, *labels)
    add("gpufn_attempts_failed", each.failed, *labels)
    add("gpufn_attempts_seconds", each.run_seconds, *labels)
    add("gpufn_retries", each.retries, *labels)
    add("gpufn_gpu_seconds", each.gpu_seconds or None, *labels)
    for result, count in (("ready", each.starts), ("resumed", each.resumes), ("failed", each.failed_starts)):
        add("gpufn_starts", count, *labels, result)
    for phase in PHASES:
        add("gpufn_start_phase_seconds", each.phase_seconds.get(phase), *labels, phase)


class _Figures:
    """Samples that are added later."""

    def __init__(self) -> None:
        self._samples: list[tuple[str, float, tuple[str, ...]]] = []
        self.dropped = 0

    def add(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            self._samples.append((name, value, labels))

    def fill(self, families: Families) -> None:
        for name, value, labels in self._samples:
            families.add(name, value, *labels)
        families.dropped += self.dropped


@dataclass(frozen=True, kw_only=True)
class PlatformSeries:
    """`builds` returns all known builds."""

    controller: Controller
    registry: Registry
    builds: Callable[[], Iterable[Build]]
    clock: Clock

    def snapshot(self) -> Fill:
        """The controller changes its world all the time, so all figures are taken from it here: a few per function."""
        figures = _Figures()
        figures.add("gpufn_controller_epoch", self.controller.epoch)
        self._add_nodes(figures)
        self._add_functions(figures)
        self._add_builds(figures)
        return figures.fill

    def _add_nodes(self, figures: _Figures) -> None:
        now, world = self.clock.monotonic(), self.controller.world
        counts = Counter(dict.fromkeys(_STATES, 0))
        for name, view in world.nodes.items():
            state = node_state(view, now)
            counts[state] += 1
            figures.add("gpufn_node_up", state == "up", name)
            if view.report is not None:
                part = fragmentation(view.report.devices, world.leases.used(name))
                figures.add("gpufn_node_gpu_fragmentation_ratio", part, name)
        for state, count in counts.items():
            figures.add("gpufn_nodes", count, state)

    def _add_functions(self, figures: _Figures) -> None:
        add, statuses = figures.add, self.registry.statuses
        for name in itertools.islice(self.registry.functions, _MAX_FUNCTIONS):
            if (status := statuses.get(name)) is None:
                continue
            add("gpufn_function_queued_calls", status.queued, name)
            add("gpufn_function_running_calls", status.running, name)
            add("gpufn_function_wanted_workers", status.wanted, name)
            add("gpufn_function_start_blocked", status.start_error is not None, name)
        figures.dropped += max(0, len(self.registry.functions) - _MAX_FUNCTIONS)
        workers = self.controller.world.workers.values()
        counts = Counter((worker.key[0], worker.state) for worker in workers if not worker.assignment.rank)
        for (function, state), count in counts.items():
            add("gpufn_workers", count, function, state.value)
        # Without workers there is a zero, so that a query of a function is never empty.
        for name in self.registry.functions.keys() - {function for function, _ in counts}:
            add("gpufn_workers", 0, name, WorkerState.READY.value)

    def _add_builds(self, figures: _Figures) -> None:
        states = Counter({BuildState.PENDING: 0, BuildState.BUILDING: 0})
        waits_since = now = self.clock.time()
        for build in self.builds():
            if build.state in states:
                states[build.state] += 1
            if build.state is BuildState.PENDING:
                waits_since = min(waits_since, build.created_at)
        for state, count in states.items():
            figures.add("gpufn_builds", count, state.value)
        figures.add("gpufn_build_oldest_wait_seconds", now - waits_since)


def node_state(view: NodeView, now: float) -> str:
    """Return `up`, `silent` if only the runner reports, or `gone`. A node that left is `gone` for an hour."""
    if not view.is_agent_silent(now):
        return "up"
    return "gone" if view.is_runner_lost(now) else "silent"
