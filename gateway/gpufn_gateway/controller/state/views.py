"""Views: the controller's memory of one worker, one node and one revision. Pure; `World` keeps them up to date."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

import msgspec

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.domain.worker import Assignment, ColdStart, Desired, ParkedMemory, WorkerState
from gpufn_core.protocol.reports import LastStart, NodeReport, RevisionTraffic, WorkerEvent
from gpufn_gateway.controller.decide.scaling.circuit import Circuit
from gpufn_gateway.controller.decide.scaling.policy import ScaleDecision
from gpufn_gateway.controller.placement.last_failure import PlacementFailure
from gpufn_gateway.controller.state.window import Average, Peak, Rate

NODE_LOST_S = 10.0
RUNNER_LOST_S = 20.0  # a killed runner is back much sooner, and its workers with it
NODE_FORGOTTEN_S = 3600.0
REPORT_STALE_S = 5.0  # a runner reports each second; after five seconds it is unknown which workers are idle
PARKING_PHASES = ("park", "resume")  # a failure in these phases is no failed start
_ARRIVALS_S = 6.0
_AVERAGE_S = 60.0
_COLD_STARTS_KEPT = 15
_SERVICE_WEIGHT = 0.1  # weight of one call in the running average
_COMPARABLE = 3  # starts of each kind that must be measured before their medians are compared
_MIN_SAVED_S = 0.1  # by a resume: an unmeasured saving is worth something

# A step reads the state of each worker 18 times, and looking up an enum member takes 70 ns in Python 3.11.
_FAILED, _DRAINING, _STARTING = WorkerState.FAILED, WorkerState.DRAINING, WorkerState.STARTING
_PARKING, _PARKED, _RESUMING = WorkerState.PARKING, WorkerState.PARKED, WorkerState.RESUMING


class WorkerView:
    """One Assignment and the reported state of its worker."""

    def __init__(self, assignment: Assignment, now: float) -> None:
        self.assignment = assignment
        self.since = now  # STARTING since
        self.reported: WorkerState | None = None
        self.slots = 0
        self.in_use = 0
        self.left_over = 0  # slots in use by calls that are queued again or run elsewhere
        self.waits_on = ""  # the GPU on which its calls wait for a turn
        self.waits_for_own = 0  # slots in use by calls that wait for other calls of the same function
        self.idle_since: float | None = None
        self.drain_requested = assignment.desired is Desired.DRAIN
        self.park_requested = assignment.desired is Desired.PARK
        self.park_bytes = assignment.park_bytes
        self.reserved_bytes = 0  # host memory, while it parks
        self.parked: ParkedMemory | None = None  # as its agent proved it; until it is asked to resume
        self.version = 0  # version of the Assignment's record
        self.is_written = False  # a change of the record is being written
        self.was_ready = False
        self.has_failed = False  # its start failed
        self.is_gone = False  # its process has exited; the lease lasts until the Assignment is deleted

    def __repr__(self) -> str:
        return f"<WorkerView {self.assignment.worker} {self.state}>"

    @property
    def key(self) -> RevisionKey:
        return self.assignment.function, self.assignment.revision

    @property
    def state(self) -> WorkerState:
        if self.is_gone or self.has_failed:
            return _FAILED
        if self.drain_requested or self.reported is _DRAINING:
            return _DRAINING
        if self.park_requested:
            return _PARKING if self.parked is None else _PARKED
        if self.reported is _PARKING or self.reported is _PARKED:
            return _RESUMING
        return self.reported or _STARTING

    @property
    def is_stored(self) -> bool:
        """Return whether its record has the desired state."""
        return self.version > 0 and not self.is_written

    @property
    def desired(self) -> Desired:
        """The state that was last requested."""
        if self.drain_requested:
            return Desired.DRAIN
        return Desired.PARK if self.park_requested else Desired.RUN


class Moving(msgspec.Struct, frozen=True):
    """A move in progress. `for_function` needs the room; `until` (monotonic) the replacement must be READY."""

    for_function: str
    until: float


class NodeView:
    def __init__(self, now: float) -> None:
        self.seen_at = now  # time of the agent's last report, or when we began to wait for one
        self.report: NodeReport | None = None
        self.offer: NodeReport | None = None  # the first report with the same offer as the last one
        self.runner = ""
        self.counters: dict[RevisionKey, RevisionTraffic] = {}  # as last reported by the runner
        self.runner_seen_at = now  # the same as `seen_at`, for the runner
        self.has_runner_report = False  # since the wait for its report began

    def on_report(self, report: NodeReport, now: float) -> None:
        self.report, self.seen_at = report, now
        if self.offer is None or _for_placement(self.offer) != _for_placement(report):
            self.offer = report

    def on_runner(self, now: float) -> None:
        self.runner_seen_at, self.has_runner_report = now, True

    def reset_silence(self, now: float) -> None:
        self.seen_at = self.runner_seen_at = now
        self.has_runner_report = False

    def is_agent_silent(self, now: float) -> bool:
        return now - self.seen_at > NODE_LOST_S

    def is_runner_lost(self, now: float) -> bool:
        """Return whether the runner is lost. Its process may live, but a runner that does not report does not serve."""
        return now - self.runner_seen_at > RUNNER_LOST_S

    def has_gone(self, now: float) -> bool:
        return now - max(self.seen_at, self.runner_seen_at) > NODE_FORGOTTEN_S

    def has_fresh_runner_report(self, now: float) -> bool:
        """Return whether the runner has reported its workers lately."""
        return self.has_runner_report and now - self.runner_seen_at <= REPORT_STALE_S

    def serves(self, worker: WorkerView, now: float) -> bool:
        """Return whether the runner reports this worker as working, recently enough for a lost agent not to matter."""
        is_working = worker.reported is not None and worker.reported.live and worker.was_ready
        return is_working and self.has_runner_report and now - self.runner_seen_at <= NODE_LOST_S


class RevisionView:
    """The controller's memory of a revision: its windows, its circuit, the last decision."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerView] = {}
        self.circuit = Circuit()
        self.ended_at_opening = 0  # the opening of the circuit at which queued calls were last ended
        self.cold_starts: deque[float] = deque(maxlen=_COLD_STARTS_KEPT)
        self.resumes: deque[float] = deque(maxlen=_COLD_STARTS_KEPT)
        self.resumed = 0
        self.last_start: LastStart | None = None
        self.start_s_by_node: dict[str, float] = {}  # of the last cold start on each node, without its fetches
        self.parked_bytes: int | None = None  # host memory that one parked worker takes
        self.no_parking_reason = ""  # why its workers are no longer parked
        self.refused_modules = ""  # why its last worker found some modules in no template
        self.service_s: float | None = None
        self.ended = 0
        self.failed = 0
        self.busy_since: float | None = None  # calls have been running since then and none has ended
        self.waiting_since: float | None = None
        self.served_at = -math.inf  # when it was last seen to be the serving revision
        self.forget()

    def forget(self) -> None:
        """Drop data that only a leader that watched continuously can know."""
        self.in_flight = Average(_AVERAGE_S)
        self.arrivals = Rate(_ARRIVALS_S)
        self.peak_calls_60s = Peak(_AVERAGE_S)
        self.peak_calls_6s = Peak(_ARRIVALS_S)
        self.want: Peak | None = None
        self.last: ScaleDecision | None = None
        self.placement_failure: PlacementFailure | None = None  # until a worker or a suitable node appears

    def on_traffic(self, before: RevisionTraffic | None, traffic: RevisionTraffic) -> None:
        """Apply the counts of a runner since `before`; None means since the runner started."""
        if before is None:
            before = RevisionTraffic(traffic.function, traffic.revision)
        ended = traffic.ended - before.ended
        if ended <= 0:
            return
        self.ended += ended
        self.failed += max(0, traffic.failed - before.failed)
        self.busy_since = None
        each_s = (traffic.run_seconds - before.run_seconds) / ended
        if not is_duration(each_s):
            return
        weight = 1.0 - (1.0 - _SERVICE_WEIGHT) ** ended
        self.service_s = each_s if self.service_s is None else self.service_s + weight * (each_s - self.service_s)

    @property
    def cold_start_s(self) -> float | None:
        """Seconds that the next worker takes to become ready: a resume, while one is parked."""
        is_parked = self.in_state(WorkerState.PARKED, WorkerState.RESUMING)
        return _median(self.resumes if is_parked and self.resumes else self.cold_starts)

    @property
    def typical_start_s(self) -> float:
        """Median seconds of a cold start on the nodes that had one, without fetches."""
        return _median(self.start_s_by_node.values()) or 0.0

    @property
    def slower_resume(self) -> str:
        """Describe that resumes take longer than cold starts, as measured for this revision; empty otherwise."""
        if min(len(self.resumes), len(self.cold_starts)) < _COMPARABLE:
            return ""
        resume_s, start_s = statistics.median(self.resumes), statistics.median(self.cold_starts)
        return f"its resumes take {resume_s:.1f} s, and its starts {start_s:.1f} s" if resume_s > start_s else ""

    @property
    def saved_by_resuming_s(self) -> float:
        """Seconds that a resume saves compared with a cold start."""
        return max(_MIN_SAVED_S, (_median(self.cold_starts) or 1.0) - (_median(self.resumes) or 0.0))

    def record_start(self, start: ColdStart, node: str, known_s: float, at: float) -> None:
        """Record a cold start or a resume that ended `at`, in unix seconds.

        `known_s` is the age of the Assignment here. Placing the worker took at most this time, even if the clocks of
        two hosts suggest more.
        """
        start = msgspec.structs.replace(start, place_s=min(start.place_s, known_s))
        if not is_duration(start.total_s):
            return
        self.last_start = LastStart(node, at, start.phases)
        if start.resume_s is None:
            self.cold_starts.append(start.total_s)
            self.start_s_by_node[node] = start.total_s - start.place_s - start.fetch_s
        else:
            self.resumes.append(start.total_s)
            self.resumed += 1

    def on_parking_event(self, event: WorkerEvent, worker: WorkerView | None) -> None:
        """Record a failure to park or resume a worker, for the next worker."""
        if event.needs_bytes:
            self.parked_bytes = event.needs_bytes
        elif event.failure is not None and event.failure.phase in PARKING_PHASES:
            self.no_parking_reason = f"a worker did not {event.failure.phase}: {event.failure.error.message}"
        elif event.exit is not None and worker is not None and worker.state is WorkerState.PARKING:
            self.no_parking_reason = f"a worker {event.exit.describe()} while it parked"

    def in_state(self, *states: WorkerState) -> list[WorkerView]:
        return [worker for worker in self.workers.values() if worker.state in states]


def _for_placement(report: NodeReport) -> tuple[object, ...]:
    """Return all that placement reads. Placement caches results by the identity of the report object."""
    isolation = tuple(report.isolation_trouble.items())
    trouble = report.container_trouble, report.gpu_container_trouble, isolation
    environments = report.machine, report.pythons
    return report.devices, report.links, report.facts, trouble, report.contains_all, report.address, environments


def window_for(view: RevisionView, span_s: float, held: int, now: float) -> Peak:
    """Return the window of wanted workers. It starts with the existing workers: a restarted controller has no history,
    and that is no reason to stop running workers."""
    if view.want is None:
        view.want = Peak(span_s)
        view.want.record(now, held)
    return view.want


def _median(seconds: Collection[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def is_duration(seconds: float) -> bool:
    """Return whether a reported value is a valid duration. A NaN from another process would stay in every average."""
    return math.isfinite(seconds) and seconds >= 0
