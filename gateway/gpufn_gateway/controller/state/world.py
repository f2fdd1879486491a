"""The world as the controller sees it: what was told, joined. Pure: every method that needs the time takes `now`.

`now` is monotonic seconds; what other processes say in unix seconds is used only as differences between two of their
own times, so that no clock has to agree with another.

What is known of a worker is joined from three sources: its Assignment (it shall exist), the runner's reports and events
(how it is), the agent's `exited` event (it is gone). A node whose agent is silent for `NODE_LOST_S` is lost, with all
of its workers but those that its runner still serves: an agent that starts again adopts them. So are the workers of one
whose runner is silent for `RUNNER_LOST_S`, which take no calls. A controller that just started, or was itself cut off,
waits that long for the first report: unknown is not zero.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpufn_core.domain.revision import Function, Revision, RevisionKey
from gpufn_core.domain.worker import OF_THE_NODE, Assignment, Desired, ParkedMemory, WorkerState
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
from gpufn_gateway.controller.state.depths import Depths
from gpufn_gateway.controller.state.holdings import Holdings
from gpufn_gateway.controller.state.leases import LeaseBook
from gpufn_gateway.controller.state.views import OF_PARKING, NodeView, RevisionView, WorkerView
from gpufn_gateway.controller.store_health import Store


class World:
    def __init__(self, now: float) -> None:
        self.functions: dict[str, Function] = {}
        self.revisions: dict[RevisionKey, Revision] = {}
        self.views: dict[RevisionKey, RevisionView] = {}
        self.workers: dict[str, WorkerView] = {}
        self.nodes: dict[str, NodeView] = {}
        self.holdings = Holdings()
        self.shortages = Shortages()
        self.unleased = LeaseBook()  # as if no worker had anything
        self.waiting: set[str] = set()  # functions that want workers and found no room, as of the last steps
        self._of_node: dict[str, dict[str, WorkerView]] = {}
        self._direct_calls: dict[RevisionKey, dict[str, int]] = {}  # by node, where there are any
        self._numbers: dict[str, set[int]] = {}  # revisions with a view, by function
        self.depths = Depths(now)
        self.store = Store()
        self._unknown_since: dict[str, float] = {}  # functions with calls that no longer exist

    def __repr__(self) -> str:
        return f"<World [{len(self.functions)} functions, {len(self.workers)} workers, {len(self.nodes)} nodes]>"

    @property
    def leases(self) -> LeaseBook:
        return self.holdings.leases

    # --- records ---

    def on_function(self, name: str, function: Function | None) -> None:
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
        """A lease begins, changes or ends. Told twice is told once: by ourselves when we decide, then by the watch.
        `version` is its record's, 0 when it has none yet."""
        known = self.workers.get(worker)
        if assignment is None:
            if known is not None:
                del self.workers[worker]
                self._of_node[known.assignment.node].pop(worker, None)
                self.view(known.key).workers.pop(worker, None)
                self.holdings.end(known)
            return
        if known is not None:
            if version < known.version:
                return
            known.version = version
            known.assignment = assignment
            # What we asked for stays asked: the watch may still be telling how it was before.
            known.drain_asked = known.drain_asked or assignment.desired is Desired.DRAIN
            if not known.is_written and known.park_asked is not (assignment.desired is Desired.PARK):
                self.holdings.ask(known, assignment.desired, assignment.park_bytes)
            return
        self.workers[worker] = self.view((assignment.function, assignment.revision)).workers[worker] = WorkerView(
            assignment, now
        )
        self._of_node.setdefault(assignment.node, {})[worker] = self.workers[worker]
        self.holdings.begin(self.workers[worker])
        if assignment.node not in self.nodes:
            self.nodes[assignment.node] = NodeView(now)

    def ask(self, worker: WorkerView, desired: Desired, park_bytes: int = 0, expected_bytes: int = 0) -> None:
        """What we want of a worker from now on, before its record says so: see `was_written`."""
        worker.is_written = True
        self.holdings.ask(worker, desired, park_bytes, expected_bytes)

    def was_written(self, worker: WorkerView, assignment: Assignment, version: int) -> None:
        """The record says what was asked; or, after a failure, what it said before counts again."""
        worker.is_written = False
        if self.workers.get(assignment.worker) is worker:  # else it has ended meanwhile
            self.on_assignment(assignment.worker, assignment, worker.since, version)

    # --- reports and events ---

    def on_node_report(self, report: NodeReport, now: float) -> bool:
        """Whether the node is new, or offers other devices than before, or more of them: a worker is parked."""
        node = self.nodes.get(report.node)
        if node is None:
            node = self.nodes[report.node] = NodeView(now)
        has_changed = node.report is None or node.report.devices != report.devices
        node.on_report(report, now)
        for process in report.processes:
            worker = self.workers.get(process.worker)
            if process.parked is not None and worker is not None and worker.park_asked:
                has_changed |= self._is_parked(worker, process.parked)
        return has_changed

    def _is_parked(self, worker: WorkerView, parked: ParkedMemory) -> bool:
        """Proven; whether that is news."""
        view = self.view(worker.key)
        view.parked_bytes = parked.host_bytes
        return self.holdings.prove(worker, parked, uses=view.resumed + 1, saved_s=view.saved_by_resuming_s)

    def on_runner_report(self, report: RunnerReport, now: float) -> set[str]:
        """The functions whose workers got ready, left, or became idle."""
        node = self.nodes.get(report.node)
        if node is None:
            node = self.nodes[report.node] = NodeView(now)
        is_known = node.runner == report.runner
        node.runner = report.runner
        node.on_runner(now)
        changed: set[str] = set()
        told = {worker.worker for worker in report.workers}
        for worker in report.workers:
            if self._on_worker_report(worker, report.sent_at, now):
                changed.add(worker.function)
        for view in self._of_node.get(report.node, {}).values():
            if view.reported is not None and view.assignment.worker not in told:
                # The runner started again and has not heard from it yet: it may be back in a moment.
                view.reported, view.idle_since, view.since = None, None, now
                changed.add(view.assignment.function)
        counters = {(traffic.function, traffic.revision): traffic for traffic in report.traffic}
        if is_known:  # what a runner counted before we listened is no traffic of now
            for key, traffic in counters.items():
                self.view(key).on_traffic(node.counters.get(key), traffic)
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
        worker = self.workers.get(event.worker)
        view = self.view((event.function, event.revision))
        view.learn_to_park(event, worker)
        match event.kind:
            case WorkerEventKind.READY:
                view.circuit.became_ready()
                if event.cold_start is not None:
                    view.started_in(event.cold_start, 0.0 if worker is None else now - worker.since)
                if worker is not None:
                    worker.was_ready = True
                    worker.reported = WorkerState.READY
                    worker.idle_since = now
            case WorkerEventKind.START_FAILED if event.failure is not None:
                if event.failure.phase not in (*OF_PARKING, OF_THE_NODE) and (worker is None or not worker.has_failed):
                    self._start_failed((event.function, event.revision), event.failure.error, now)
                if worker is not None:
                    worker.has_failed = True
            case WorkerEventKind.NOT_PARKED if worker is not None:
                worker.reported = WorkerState.DRAINING
            case WorkerEventKind.EXITED if worker is not None:
                is_its_own = not (worker.was_ready or worker.has_failed or worker.drain_asked)
                if is_its_own and not _found_no_runner(event, now - worker.since):
                    self._start_failed(worker.key, _exit_error(event), now)
                    worker.has_failed = True
                worker.is_gone = True
            case _:
                pass

    def on_doorbell(self, function: str, now: float) -> None:
        """A call was queued for a function without READY workers."""
        self.depths.ring(function, now)

    def on_depths(self, depths: dict[RevisionKey, int] | None, asked_at: float, now: float) -> None:
        """Calls stored per revision, queued and running; None when they could not be read."""
        self.depths.read(depths, asked_at, now)
        if depths is None:
            return
        for key in depths:
            self.view(key)
        for key, view in list(self.views.items()):
            calls = depths.get(key, 0) + self._direct(key, now)
            running = self.running(view, now)
            view.in_flight.record(now, running)
            view.arrivals.record(now, view.ended + calls)
            view.most_calls.record(now, calls)
            view.most_lately.record(now, calls)
            if not running:
                view.busy_since = None
            elif view.busy_since is None:
                view.busy_since = now
            self._forget_if_unused(key, view, calls)
        queued = {name for (name, _), count in depths.items() if count and name not in self.functions}
        self._unknown_since = {name: self._unknown_since.get(name, now) for name in queued}

    def forgive(self, now: float) -> None:
        """We were away ourselves (the bus, a suspended machine): nobody else's silence counts until now."""
        for node in self.nodes.values():
            node.forgive(now)
        self.depths.forget()

    def forget_nodes(self, now: float) -> None:
        """Those that will not come back."""
        in_use = {worker.assignment.node for worker in self.workers.values()}
        for name in [name for name, node in self.nodes.items() if name not in in_use and node.has_gone(now)]:
            self._count_direct(name, self.nodes.pop(name).counters, {})
            self._of_node.pop(name, None)
            self.holdings.forget(name)
            self.unleased.forget(name)

    def forget_unused(self) -> None:
        """Who stands by knows of no calls, and so of no reason to remember a revision that has no workers."""
        for key, view in list(self.views.items()):
            self._forget_if_unused(key, view, 0)

    def take_over(self, now: float) -> None:
        """We lead from now on: the workers that there are become the floor for one window (see `plan`)."""
        for view in self.views.values():
            view.forget()
        self.depths.forget()
        self._unknown_since.clear()

    # --- what follows from it ---

    def view(self, key: RevisionKey) -> RevisionView:
        found = self.views.get(key)
        if found is None:
            found = self.views[key] = RevisionView()
            self._numbers.setdefault(key[0], set()).add(key[1])
        return found

    def numbers(self, function: str) -> set[int]:
        """The revisions of a function that anything is remembered of."""
        return self._numbers.get(function, set())

    def calls(self, key: RevisionKey, now: float) -> int | None:
        """Queued and running; None when unknown."""
        stored = self.depths.of(key, now)
        return None if stored is None else stored + self._direct(key, now)

    def in_use(self, now: float) -> set[RevisionKey] | None:
        """Revisions that have workers or calls; None when unknown."""
        with_calls = self.depths.with_calls(now)
        return None if with_calls is None else with_calls | {worker.key for worker in self.workers.values()}

    def _direct(self, key: RevisionKey, now: float) -> int:
        """Calls that came past the queue, as last reported: not those of a runner that nobody will hear of again."""
        counted = self._direct_calls.get(key)
        if not counted:
            return 0
        return sum(calls for node, calls in counted.items() if not self.nodes[node].is_runner_lost(now))

    def running(self, view: RevisionView, now: float) -> int | None:
        """Calls that run, as far as every runner concerned has reported lately. Of a worker with a batch, the calls
        beyond those that its runs can have gather: they have not begun."""
        running = 0
        for worker in view.workers.values():
            node = self.nodes.get(worker.assignment.node)
            if node is None or not node.tells_of_workers(now):
                if worker.reported is None:
                    continue  # it has not begun
                return None
            revision = self.revisions.get(worker.key)
            running += worker.in_use if revision is None else min(worker.in_use, revision.spec.parallel_calls)
        return running

    def idle_for(self, worker: WorkerView, now: float) -> float | None:
        """Seconds without a call; None while it has one, is neither READY nor PARKED, or its runner is silent."""
        if worker.state not in (WorkerState.READY, WorkerState.PARKED) or worker.idle_since is None:
            return None
        node = self.nodes.get(worker.assignment.node)
        if node is None or not node.tells_of_workers(now):
            return None
        return max(0.0, now - worker.idle_since)

    def reports(self, now: float) -> list[NodeReport]:
        """The nodes where workers can be placed, by what they offer: these need not be the last reports of them."""
        return [
            node.offer
            for node in self.nodes.values()
            if node.offer is not None and not node.is_agent_silent(now) and not node.is_runner_lost(now)
        ]

    def lost_workers(self, now: float) -> Iterator[tuple[WorkerView, str]]:
        """With who is silent."""
        for worker in self.workers.values():
            name = worker.assignment.node
            node = self.nodes[name]
            if node.is_agent_silent(now) and not node.serves(worker, now):
                yield worker, f"node {name}"
            elif node.is_runner_lost(now):
                yield worker, f"the runner of node {name}"

    def deleted_functions(self, now: float, after_s: float) -> Iterator[str]:
        """Functions that are gone and still have calls: for `after_s`, as a new one's record may reach us late."""
        for name, since in self._unknown_since.items():
            if now - since >= after_s:
                yield name

    # --- inside ---

    def _start_failed(self, key: RevisionKey, error: ErrorInfo, now: float) -> None:
        function = self.functions.get(key[0])
        took_a_place = False
        if function is not None and key[1] == function.active != function.serving:
            serving = self.view((function.name, function.serving))
            took_a_place = not serving.in_state(WorkerState.READY, WorkerState.PARKED)
        self.view(key).circuit.failed(now, error, took_a_place=took_a_place)

    def _on_worker_report(self, report: WorkerReport, sent_at: float, now: float) -> bool:
        worker = self.workers.get(report.worker)
        if worker is None:
            return False
        was = worker.state, worker.idle_since is None
        if report.state is WorkerState.READY and worker.reported is not WorkerState.READY:
            view = self.view(worker.key)
            view.circuit.became_ready()  # its event may have been lost: events are sent once
            if report.cold_start is not None and report.cold_start.resume_s is None and not view.cold_starts:
                view.started_in(report.cold_start, now - worker.since)
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
        return was != (worker.state, worker.idle_since is None)

    def _forget_if_unused(self, key: RevisionKey, view: RevisionView, calls: int) -> None:
        function = self.functions.get(key[0])
        is_used = function is not None and key[1] in (function.serving, function.active)
        if is_used or view.workers or calls:
            return
        del self.views[key]
        if not self._direct_calls.get(key, True):
            del self._direct_calls[key]
        numbers = self._numbers[key[0]]
        numbers.discard(key[1])
        if not numbers:
            del self._numbers[key[0]]


def _found_no_runner(event: WorkerEvent, known_s: float) -> bool:
    """All the time that it looked for one; `known_s`, for how long its Assignment is known here, is longer. That is no
    failure of the function's code, which could exit with this code too, but not be started again and again for it
    within an instant."""
    return known_s >= CONNECT_S and event.exit is not None and event.exit.code == EXIT_LINK_LOST


def _exit_error(event: WorkerEvent) -> ErrorInfo:
    how = event.exit.describe() if event.exit is not None else "ended"
    tail = f"\n{event.exit.tail}" if event.exit is not None and event.exit.tail else ""
    return FunctionStartFailed(f"{event.function}: the worker {how} before it was ready{tail}").info()
