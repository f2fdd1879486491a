"""The world as the controller sees it: reports, joined. Pure: every method that needs the time takes `now`.

`now` is monotonic seconds. Unix seconds from other processes are only used as differences between two times of the same
process, so clocks need not agree.

The view of a worker joins three sources: its Assignment (it is wanted), the runner's reports and events (its state),
the agent's `exited` event (it has ended). A node whose agent is silent for `NODE_LOST_S` is lost, with all of its
workers except those that its runner still serves: a restarted agent adopts them. If the runner is silent for
`RUNNER_LOST_S`, the workers are lost too, since they take no calls. A controller that just started, or was itself cut
off, waits that long for the first report: unknown is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gpufn_core.domain.revision import Function, Revision, RevisionKey
from gpufn_core.domain.team import Teams
from gpufn_core.domain.worker import NODE_PHASE, Assignment, Desired, Gang, ParkedMemory, WorkerState
from gpufn_core.errors import ErrorInfo, FunctionStartFailed
from gpufn_core.protocol.launch import CONNECT_S, EXIT_LINK_LOST
from gpufn_core.protocol.reports import (
    NodeReport,
    RevisionTraffic,
    RunnerReport,
    WorkerEvent,
    WorkerEventKind,
    WorkerReport,
)
from gpufn_gateway.controller.placement.shortage import Shortages
from gpufn_gateway.controller.state.arrivals import Arrivals
from gpufn_gateway.controller.state.depths import Depths
from gpufn_gateway.controller.state.holdings import Holdings
from gpufn_gateway.controller.state.leases import LeaseBook
from gpufn_gateway.controller.state.split_calls import SplitCalls
from gpufn_gateway.controller.state.team_use import TeamUse
from gpufn_gateway.controller.state.views import PARKING_PHASES, Moving, NodeView, RevisionView, WorkerView
from gpufn_gateway.controller.store_health import Store


class World:
    def __init__(self, now: float) -> None:
        self.functions: dict[str, Function] = {}
        self.split_calls = SplitCalls()
        self.revisions: dict[RevisionKey, Revision] = {}
        self.views: dict[RevisionKey, RevisionView] = {}
        self.workers: dict[str, WorkerView] = {}
        self.nodes: dict[str, NodeView] = {}
        self.drained: set[str] = set()  # nodes that accept no new workers; their workers move away
        self.holdings = Holdings()
        self.shortages = Shortages()
        self.unleased = LeaseBook()  # empty, for checks against an empty node
        self.waiting: set[str] = set()  # functions that need workers and found no room in the last steps
        self._gangs: dict[str, Gang] = {}  # gangs that have processes, by leader
        self._by_node: dict[str, dict[str, WorkerView]] = {}
        self._direct_calls: dict[RevisionKey, dict[str, int]] = {}  # by node; only revisions that have some
        self._revision_numbers: dict[str, set[int]] = {}  # function -> revisions with a view
        self.depths = Depths(now)
        self.moving: dict[str, Moving] = {}  # by the worker that leaves once its replacement is READY
        self.search_moves_at = -math.inf  # monotonic; not before
        self.arrivals = Arrivals()
        self.teams = Teams()
        self.team_use = TeamUse()
        self.store = Store()
        self._unknown_since: dict[str, float] = {}  # deleted functions that still have calls

    def __repr__(self) -> str:
        return f"<World [{len(self.functions)} functions, {len(self.workers)} workers, {len(self.nodes)} nodes]>"

    @property
    def leases(self) -> LeaseBook:
        return self.holdings.leases

    # --- records ---

    def on_function(self, name: str, function: Function | None) -> None:
        self.split_calls.on_function(name, function)
        if function is None:
            self.functions.pop(name, None)
            self.waiting.discard(name)
        else:
            self.functions[name] = function
            self._unknown_since.pop(name, None)

    def on_revision(self, key: RevisionKey, revision: Revision | None) -> None:
        if revision is None:
            self.revisions.pop(key, None)
        else:
            self.revisions[key] = revision

    def on_assignment(self, worker: str, assignment: Assignment | None, now: float, version: int = 0) -> None:
        """Apply a lease that begins, changes or ends. Applying it twice is harmless: the controller applies its own
        decision, and then the watch reports it. `version` is the record's version, 0 while there is no record."""
        known = self.workers.get(worker)
        if assignment is None:
            if known is not None:
                del self.workers[worker]
                self.moving.pop(worker, None)
                self._by_node[known.assignment.node].pop(worker, None)
                self.view(known.key).workers.pop(worker, None)
                self.holdings.end(known)
                if known.assignment.gang is not None and not self.ranks(known):
                    self._gangs.pop(known.assignment.gang.rank_0, None)
            return
        if known is not None:
            if version < known.version:
                return
            known.version = version
            known.assignment = assignment
            # Our own request stands: the watch may still report the state before it.
            known.drain_requested = known.drain_requested or assignment.desired is Desired.DRAIN
            if not known.is_written and known.park_requested is not (assignment.desired is Desired.PARK):
                self.holdings.set_desired(known, assignment.desired, assignment.park_bytes)
            return
        self.workers[worker] = new = WorkerView(assignment, now)
        if assignment.gang is not None:
            self._gangs[assignment.gang.rank_0] = assignment.gang
        if not assignment.rank:  # a gang counts as one worker, its rank 0
            self.view(new.key).workers[worker] = new
        self._by_node.setdefault(assignment.node, {})[worker] = new
        self.holdings.begin(new)
        self.nodes.setdefault(assignment.node, NodeView(now))

    def set_desired(self, worker: WorkerView, desired: Desired, park_bytes: int = 0, expected_bytes: int = 0) -> None:
        """Set the desired state of a worker before its record has it: see `on_written`."""
        worker.is_written = True
        self.holdings.set_desired(worker, desired, park_bytes, expected_bytes)

    def on_written(self, worker: WorkerView, assignment: Assignment, version: int) -> None:
        """Apply the record after a write: it has the desired state, or, after a failure, its old state counts again."""
        worker.is_written = False
        if self.workers.get(assignment.worker) is worker:  # else the worker has ended in the meantime
            self.on_assignment(assignment.worker, assignment, worker.since, version)

    # --- reports and events ---

    def on_node_report(self, report: NodeReport, now: float) -> bool:
        """Apply a report. Return whether the node is new, its devices changed, or one of its workers is now parked."""
        node = self.nodes.setdefault(report.node, NodeView(now))
        has_changed = node.report is None or node.report.devices != report.devices
        node.on_report(report, now)
        for process in report.processes:
            worker = self.workers.get(process.worker)
            if process.parked is not None and worker is not None and worker.park_requested:
                has_changed |= self._on_parked(worker, process.parked)
        return has_changed

    def _on_parked(self, worker: WorkerView, parked: ParkedMemory) -> bool:
        """Record the proof that a worker is parked. Return whether it is new."""
        view = self.view(worker.key)
        view.parked_bytes = parked.host_bytes
        return self.holdings.record_parked(worker, parked, uses=view.resumed + 1, saved_s=view.saved_by_resuming_s)

    def on_runner_report(self, report: RunnerReport, now: float) -> set[str]:
        """Apply a report. Return the functions whose workers became ready, left, or became idle."""
        node = self.nodes.setdefault(report.node, NodeView(now))
        is_known = node.runner == report.runner
        node.runner = report.runner
        node.on_runner(now)
        changed: set[str] = set()
        reported = {worker.worker for worker in report.workers}
        for worker in report.workers:
            if self._on_worker_report(worker, report.sent_at, now):
                changed.add(worker.function)
        for view in self._by_node.get(report.node, {}).values():
            if view.reported is not None and view.assignment.worker not in reported:
                # The runner restarted and the worker has not reconnected yet: it may be back in a moment.
                view.reported, view.idle_since, view.since = None, None, now
                changed.add(view.assignment.function)
        counters = {(traffic.function, traffic.revision): traffic for traffic in report.traffic}
        if is_known:  # ignore the counts of a runner from before our subscription
            for key, traffic in counters.items():
                before = node.counters.get(key)
                self.view(key).on_traffic(before, traffic)
                self.split_calls.on_traffic(before, traffic, now)
                if traffic.started > (0 if before is None else before.started):
                    self.arrivals.record_call(key[0], now)
        self._count_direct(report.node, node.counters, counters)
        node.counters = counters
        return changed

    def _count_direct(
        self, node: str, before: dict[RevisionKey, RevisionTraffic], counters: dict[RevisionKey, RevisionTraffic]
    ) -> None:
        for key in before:
            self._direct_calls.get(key, {}).pop(node, None)
        for key, traffic in counters.items():
            if traffic.direct:
                self._direct_calls.setdefault(key, {})[node] = traffic.direct

    def on_event(self, event: WorkerEvent, now: float) -> None:
        process = self.workers.get(event.worker)
        name = event.worker if process is None else rank_0_of(process)
        worker = self.workers.get(name)
        view = self.view((event.function, event.revision))
        view.on_parking_event(event, worker)
        match event.kind:
            case WorkerEventKind.STARTED:
                view.refused_modules = event.refused_modules
            case WorkerEventKind.READY:
                view.circuit.record_ready()
                if event.cold_start is not None:
                    view.record_start(
                        event.cold_start, event.node, 0.0 if worker is None else now - worker.since, event.at
                    )
                if worker is not None:
                    worker.was_ready = True
                    worker.reported = WorkerState.READY
                    worker.idle_since = now
            case WorkerEventKind.START_FAILED if event.failure is not None:
                if event.failure.phase not in (*PARKING_PHASES, NODE_PHASE):
                    # The runner sends this and the agent the exit: either may arrive first.
                    was_counted = view.circuit.record_explanation(name, event.failure.error)
                    if not was_counted and (worker is None or not worker.has_failed):
                        self._start_failed((event.function, event.revision), event.failure.error, now)
                for each in filter(None, (process, worker)):
                    each.has_failed = True
            case WorkerEventKind.NOT_PARKED if worker is not None:
                worker.reported = WorkerState.DRAINING
            case WorkerEventKind.EXITED if process is not None:
                if worker is not None:
                    self._on_exit_of(worker, event, process.assignment, now)
                process.is_gone = True
            case _:
                pass

    def on_wakeup(self, function: str, now: float, revision: int | None = None) -> None:
        """Record that a call was queued for a function, or for one of its revisions, without READY workers."""
        self.depths.send_wakeup(function, now, revision)

    def has_wakeup(self, key: RevisionKey) -> bool:
        """Return whether a call was queued for a revision since the depths were read. A wakeup that is for no revision
        that is called is for the serving one: gateways learn of a change a moment later."""
        function = self.functions.get(key[0])
        woken = self.depths.woken(key[0])
        if not woken or function is None:
            return False
        called = function.called
        return any((number if number in called else function.serving) == key[1] for number in woken)

    def on_depths(self, depths: dict[RevisionKey, int] | None, sent_at: float, now: float) -> None:
        """Record the stored calls per revision, queued and running; None when they could not be read."""
        self.depths.read(depths, sent_at, now)
        if depths is None:
            return
        for key in depths:
            self.view(key)
        for key, view in list(self.views.items()):
            calls = depths.get(key, 0) + self._direct(key, now)
            running = self.running(view, now)
            view.in_flight.record(now, running)
            view.arrivals.record(now, view.ended + calls)
            view.peak_calls_60s.record(now, calls)
            view.peak_calls_6s.record(now, calls)
            if not running:
                view.busy_since = None
            elif view.busy_since is None:
                view.busy_since = now
            self._forget_if_unused(key, view, calls)
        queued = {name for (name, _), count in depths.items() if count and name not in self.functions}
        self._unknown_since = {name: self._unknown_since.get(name, now) for name in queued}

    def observe_arrivals(self, now: float, unix_s: float) -> None:
        """Record that calls are observed now. The history of a function stays while its serving revision is unknown."""
        wanted = {
            name
            for name, function in self.functions.items()
            if (revision := self.revisions.get((name, function.serving))) is None or revision.spec.scaling.prewarm
        }
        self.arrivals.observe(wanted, now, unix_s)

    def reset_silence(self, now: float) -> None:
        """Restart the silence timers of all nodes, because we were away ourselves (lost bus, suspended machine)."""
        for node in self.nodes.values():
            node.reset_silence(now)
        self.depths.forget()

    def forget_nodes(self, now: float) -> None:
        """Drop the nodes that have been silent for too long to come back."""
        in_use = {worker.assignment.node for worker in self.workers.values()}
        for name in [name for name, node in self.nodes.items() if name not in in_use and node.has_gone(now)]:
            self._count_direct(name, self.nodes.pop(name).counters, {})
            self._by_node.pop(name, None)
            self.holdings.forget(name)
            self.unleased.forget(name)

    def forget_unused(self) -> None:
        """Drop the views of revisions without workers. A standby controller does not know of their calls."""
        for key, view in list(self.views.items()):
            self._forget_if_unused(key, view, 0)

    def take_over(self, now: float) -> None:
        """Start to lead: the existing workers become the floor for one window (see `plan`)."""
        for view in self.views.values():
            view.forget()
        self.depths.forget()
        self.team_use = TeamUse()
        self._unknown_since.clear()

    # --- queries ---

    def ranks(self, worker: WorkerView) -> list[WorkerView]:
        """Return the processes of a worker: all known ranks of a gang, or only itself."""
        gang = worker.assignment.gang
        return [worker] if gang is None else self._ranks(gang)

    def gangs(self) -> list[tuple[Gang, list[WorkerView]]]:
        """Return the gangs and their known ranks."""
        return [(gang, self._ranks(gang)) for gang in self._gangs.values()]

    def view(self, key: RevisionKey) -> RevisionView:
        view = self.views.get(key)
        if view is None:
            view = self.views[key] = RevisionView()
            self._revision_numbers.setdefault(key[0], set()).add(key[1])
        return view

    def numbers(self, function: str) -> set[int]:
        """Return the revisions of a function that have a view."""
        return self._revision_numbers.get(function, set())

    def calls(self, key: RevisionKey, now: float) -> int | None:
        """Return the number of queued and running calls; None when unknown."""
        stored = self.depths.of(key, now)
        return None if stored is None else stored + self._direct(key, now)

    def in_use(self, now: float) -> set[RevisionKey] | None:
        """Return the revisions that have workers or calls; None when unknown."""
        with_calls = self.depths.with_calls(now)
        return None if with_calls is None else with_calls | {worker.key for worker in self.workers.values()}

    def _direct(self, key: RevisionKey, now: float) -> int:
        """Count the calls that bypassed the queue, as last reported. Calls of a lost runner do not count."""
        by_node = self._direct_calls.get(key)
        if not by_node:
            return 0
        return sum(calls for node, calls in by_node.items() if not self.nodes[node].is_runner_lost(now))

    def running(self, view: RevisionView, now: float) -> int | None:
        """Count the running calls; None unless all runners concerned have reported lately. Calls of a batching worker
        beyond its parallel runs do not count: they still gather for a batch and have not started."""
        running = 0
        for worker in view.workers.values():
            node = self.nodes.get(worker.assignment.node)
            if node is None or not node.has_fresh_runner_report(now):
                if worker.reported is None:
                    continue  # it has not started
                return None
            revision = self.revisions.get(worker.key)
            running += worker.in_use if revision is None else min(worker.in_use, revision.spec.parallel_calls)
        return running

    def idle_for(self, worker: WorkerView, now: float) -> float | None:
        """Return the seconds without a call. None while the worker has a call, is neither READY nor PARKED, or its
        runner is silent."""
        if worker.state not in (WorkerState.READY, WorkerState.PARKED) or worker.idle_since is None:
            return None
        node = self.nodes.get(worker.assignment.node)
        if node is None or not node.has_fresh_runner_report(now):
            return None
        return max(0.0, now - worker.idle_since)

    def reports(self, now: float) -> list[NodeReport]:
        """Return the reports of the nodes where workers can be placed. A report is the first one with the node's
        present offer, not necessarily the last one."""
        return [
            node.offer
            for name, node in self.nodes.items()
            if node.offer is not None
            and name not in self.drained
            and not node.is_agent_silent(now)
            and not node.is_runner_lost(now)
        ]

    def drained_reports(self, now: float) -> list[NodeReport]:
        """Return the reports of the drained nodes that are up."""
        nodes = [self.nodes[name] for name in sorted(self.drained & self.nodes.keys())]
        return [each.offer for each in nodes if each.offer is not None and not each.is_agent_silent(now)]

    def must_leave(self, worker: WorkerView) -> bool:
        """Return whether the worker, or a rank of its gang, is on a drained node."""
        return any(each.assignment.node in self.drained for each in self.ranks(worker))

    def lost_workers(self, now: float) -> Iterator[tuple[WorkerView, str]]:
        """Yield each lost worker with the name of the silent process. No runner reports ranks above 0 of a gang: while
        rank 0 serves, they run."""
        for worker in self.workers.values():
            name = worker.assignment.node
            node = self.nodes[name]
            serving = self.workers.get(rank_0_of(worker), worker)
            if node.is_agent_silent(now) and not self.nodes[serving.assignment.node].serves(serving, now):
                yield worker, f"node {name}"
            elif node.is_runner_lost(now) and serving is worker:
                yield worker, f"the runner of node {name}"

    def deleted_functions(self, now: float, after_s: float) -> list[str]:
        """Return deleted functions that still have calls. They must be unknown for `after_s`, because the record of a
        new function may arrive late."""
        return [name for name, since in self._unknown_since.items() if now - since >= after_s]

    # --- internals ---

    def _ranks(self, gang: Gang) -> list[WorkerView]:
        return [self.workers[rank.worker] for rank in gang.ranks if rank.worker in self.workers]

    def _on_exit_of(self, worker: WorkerView, event: WorkerEvent, exited: Assignment, now: float) -> None:
        """Record a failed start if a process of the worker has exited before the worker was ready."""
        was_stopped = event.exit is not None and event.exit.stopping  # with its node
        is_failed_start = not (worker.was_ready or worker.has_failed or worker.drain_requested or was_stopped)
        if is_failed_start and not _found_no_runner(event, now - worker.since):
            error = _exit_error(event, exited)
            self._start_failed(worker.key, error, now, exited=worker.assignment.worker)
            worker.has_failed = True

    def _start_failed(self, key: RevisionKey, error: ErrorInfo, now: float, *, exited: str = "") -> None:
        function = self.functions.get(key[0])
        took_a_place = False
        if function is not None and key[1] == function.active != function.serving:
            serving = self.view((function.name, function.serving))
            took_a_place = not serving.in_state(WorkerState.READY, WorkerState.PARKED)
        self.view(key).circuit.record_failure(now, error, took_a_place=took_a_place, exited=exited)

    def _on_worker_report(self, report: WorkerReport, sent_at: float, now: float) -> bool:
        worker = self.workers.get(report.worker)
        if worker is None:
            return False
        before = worker.state, worker.idle_since is None
        if report.state is WorkerState.READY and worker.reported is not WorkerState.READY:
            view = self.view(worker.key)
            view.circuit.record_ready()  # the ready event may have been lost: events are sent once
            if report.cold_start is not None and report.cold_start.resume_s is None and not view.cold_starts:
                view.record_start(report.cold_start, worker.assignment.node, now - worker.since, sent_at)
        worker.was_ready = worker.was_ready or report.state is WorkerState.READY
        worker.reported = report.state
        worker.slots = report.slots
        worker.in_use = report.in_use
        worker.left_over = report.left_over
        worker.waits_on = report.waits_on
        worker.waits_for_own = report.waits_for_own
        worker.idle_since = None if report.idle_since is None else now - max(0.0, sent_at - report.idle_since)
        if not report.state.live:
            worker.is_gone = True
        return before != (worker.state, worker.idle_since is None)

    def _forget_if_unused(self, key: RevisionKey, view: RevisionView, calls: int) -> None:
        function = self.functions.get(key[0])
        is_used = function is not None and key[1] in function.called
        if is_used or view.workers or calls:
            return
        del self.views[key]
        if not self._direct_calls.get(key, True):
            del self._direct_calls[key]
        numbers = self._revision_numbers[key[0]]
        numbers.discard(key[1])
        if not numbers:
            del self._revision_numbers[key[0]]


def _found_no_runner(event: WorkerEvent, known_s: float) -> bool:
    """Return whether the worker exited because it found no runner for its whole connect time. `known_s` is the age of
    its Assignment here, which is longer. This is no failure of the function's code. That code could exit with the same
    exit code, but the required age keeps it from being restarted in a tight loop."""
    return known_s >= CONNECT_S and event.exit is not None and event.exit.code == EXIT_LINK_LOST


def rank_0_of(worker: WorkerView) -> str:
    """Return the worker that counts: rank 0 of a gang, or the worker itself."""
    gang = worker.assignment.gang
    return worker.assignment.worker if gang is None else gang.rank_0


def _exit_error(event: WorkerEvent, assignment: Assignment) -> ErrorInfo:
    cause = event.exit.describe() if event.exit is not None else "ended"
    tail = f"\n{event.exit.tail}" if event.exit is not None and event.exit.tail else ""
    gang = assignment.gang
    what = "the worker" if gang is None else gang.describe(assignment.rank)
    return FunctionStartFailed(f"{event.function}: {what} {cause} before it was ready{tail}").info()
