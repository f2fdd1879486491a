"""What is remembered of one worker, one node and one revision. Pure; `World` keeps them up to date."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

import msgspec

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.domain.worker import Assignment, ColdStart, Desired, ParkedMemory, WorkerState
from gpufn_core.protocol.reports import NodeReport, RevisionTraffic, WorkerEvent
from gpufn_gateway.controller.decide.circuit import Circuit
from gpufn_gateway.controller.decide.policy import ScaleDecision
from gpufn_gateway.controller.placement.last_failure import Unplaced
from gpufn_gateway.controller.state.window import Average, Peak, Rate

NODE_LOST_S = 10.0
RUNNER_LOST_S = 20.0  # one that was killed is back long before, and its workers with it
NODE_FORGOTTEN_S = 3600.0
REPORT_STALE_S = 5.0  # a runner reports each second; after five it is not known who is idle
OF_PARKING = ("park", "resume")  # phases in which a start does not fail
_ARRIVALS_S = 6.0
_AVERAGE_S = 60.0
_COLD_STARTS_KEPT = 15
_SERVICE_WEIGHT = 0.1  # of one call in the running average
_LEAST_SAVED_S = 0.1  # by a resume: what nobody has measured is worth something

# A step reads the state of each worker 18 times, and to look up a member of an enum takes 70 ns in Python 3.11.
_FAILED, _DRAINING, _STARTING = WorkerState.FAILED, WorkerState.DRAINING, WorkerState.STARTING
_PARKING, _PARKED, _RESUMING = WorkerState.PARKING, WorkerState.PARKED, WorkerState.RESUMING


class WorkerView:
    """One Assignment and what is known of its worker."""

    def __init__(self, assignment: Assignment, now: float) -> None:
        self.assignment = assignment
        self.since = now  # STARTING since
        self.reported: WorkerState | None = None
        self.slots = 0
        self.in_use = 0
        self.left_over = 0  # of those in use, by calls that are queued again or run elsewhere
        self.waits_on = ""  # the GPU that its calls wait for their turn on
        self.waits_for_own = 0  # of those in use, by calls that wait for others of the same function
        self.idle_since: float | None = None
        self.drain_asked = assignment.desired is Desired.DRAIN
        self.park_asked = assignment.desired is Desired.PARK
        self.park_bytes = assignment.park_bytes
        self.promised_bytes = 0  # of the host's memory, while it parks
        self.parked: ParkedMemory | None = None  # as its agent proved it; until it is asked to resume
        self.version = 0  # of the Assignment's record
        self.is_written = False  # what is asked is on its way to the record
        self.was_ready = False
        self.has_failed = False  # its start did
        self.is_gone = False  # the process is; the lease is until the Assignment is

    def __repr__(self) -> str:
        return f"<WorkerView {self.assignment.worker} {self.state}>"

    @property
    def key(self) -> RevisionKey:
        return self.assignment.function, self.assignment.revision

    @property
    def state(self) -> WorkerState:
        if self.is_gone or self.has_failed:
            return _FAILED
        if self.drain_asked or self.reported is _DRAINING:
            return _DRAINING
        if self.park_asked:
            return _PARKING if self.parked is None else _PARKED
        if self.reported is _PARKING or self.reported is _PARKED:
            return _RESUMING
        return self.reported or _STARTING

    @property
    def is_stored(self) -> bool:
        """Whether its record says what was asked last."""
        return self.version > 0 and not self.is_written

    @property
    def desired(self) -> Desired:
        """As it was asked last."""
        if self.drain_asked:
            return Desired.DRAIN
        return Desired.PARK if self.park_asked else Desired.RUN


class NodeView:
    def __init__(self, now: float) -> None:
        self.seen_at = now  # the agent's last report, or since when one is awaited
        self.report: NodeReport | None = None
        self.offer: NodeReport | None = None  # the first report that offered what the last one does
        self.runner = ""
        self.counters: dict[RevisionKey, RevisionTraffic] = {}  # as the runner told them last
        self.runner_seen_at = now  # as `seen_at`
        self.has_runner_told = False  # since a report of it is awaited

    def on_report(self, report: NodeReport, now: float) -> None:
        self.report, self.seen_at = report, now
        if self.offer is None or _for_placement(self.offer) != _for_placement(report):
            self.offer = report

    def on_runner(self, now: float) -> None:
        self.runner_seen_at, self.has_runner_told = now, True

    def forgive(self, now: float) -> None:
        self.seen_at = self.runner_seen_at = now
        self.has_runner_told = False

    def is_agent_silent(self, now: float) -> bool:
        return now - self.seen_at > NODE_LOST_S

    def is_runner_lost(self, now: float) -> bool:
        """Though its process may be there: what it does not tell, it does not serve."""
        return now - self.runner_seen_at > RUNNER_LOST_S

    def has_gone(self, now: float) -> bool:
        return now - max(self.seen_at, self.runner_seen_at) > NODE_FORGOTTEN_S

    def tells_of_workers(self, now: float) -> bool:
        """Whether its runner has told lately how they are."""
        return self.has_runner_told and now - self.runner_seen_at <= REPORT_STALE_S

    def serves(self, worker: WorkerView, now: float) -> bool:
        """Whether its runner has told, since an agent of it would be lost, that this worker is at work."""
        is_at_work = worker.reported is not None and worker.reported.live and worker.was_ready
        return is_at_work and self.has_runner_told and now - self.runner_seen_at <= NODE_LOST_S


class RevisionView:
    """What is remembered of a revision: its windows, its circuit, the last decision."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerView] = {}
        self.circuit = Circuit()
        self.ended_at_opening = 0  # queued calls were ended at this many openings of the circuit
        self.cold_starts: deque[float] = deque(maxlen=_COLD_STARTS_KEPT)
        self.resumes: deque[float] = deque(maxlen=_COLD_STARTS_KEPT)
        self.resumed = 0
        self.parked_bytes: int | None = None  # of the host's memory, that one of its workers takes
        self.cannot_park = ""  # why none of its workers is parked again
        self.service_s: float | None = None
        self.ended = 0
        self.failed = 0
        self.busy_since: float | None = None  # calls run since then and none has ended
        self.waiting_since: float | None = None
        self.served_at = -math.inf  # when it was last seen to be the serving revision
        self.forget()

    def forget(self) -> None:
        """Drop what only a leader that looked all the time can know."""
        self.in_flight = Average(_AVERAGE_S)
        self.arrivals = Rate(_ARRIVALS_S)
        self.most_calls = Peak(_AVERAGE_S)
        self.most_lately = Peak(_ARRIVALS_S)
        self.want: Peak | None = None
        self.last: ScaleDecision | None = None
        self.unplaced: Unplaced | None = None  # until a worker is placed, or a node appears that could take one

    def on_traffic(self, before: RevisionTraffic | None, traffic: RevisionTraffic) -> None:
        """What a runner has counted since `before`; None: since it started."""
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
        """What the next worker takes: a resume, while one is parked."""
        is_parked = self.in_state(WorkerState.PARKED, WorkerState.RESUMING)
        return _median(self.resumes if is_parked and self.resumes else self.cold_starts)

    @property
    def saved_by_resuming_s(self) -> float:
        """Against a cold start."""
        return max(_LEAST_SAVED_S, (_median(self.cold_starts) or 1.0) - (_median(self.resumes) or 0.0))

    def started_in(self, start: ColdStart, known_s: float) -> None:
        """`known_s` is for how long its Assignment has been known here: to place it took no longer, whatever follows
        from the clocks of two hosts."""
        start = msgspec.structs.replace(start, place_s=min(start.place_s, known_s))
        if not is_duration(start.total_s):
            return
        if start.resume_s is None:
            self.cold_starts.append(start.total_s)
        else:
            self.resumes.append(start.total_s)
            self.resumed += 1

    def learn_to_park(self, event: WorkerEvent, worker: WorkerView | None) -> None:
        """What a worker that could not be parked, or resumed, says of the next one."""
        if event.needs_bytes:
            self.parked_bytes = event.needs_bytes
        elif event.failure is not None and event.failure.phase in OF_PARKING:
            self.cannot_park = f"a worker did not {event.failure.phase}: {event.failure.error.message}"
        elif event.exit is not None and worker is not None and worker.state is WorkerState.PARKING:
            self.cannot_park = f"a worker {event.exit.describe()} while it parked"

    def in_state(self, *states: WorkerState) -> list[WorkerView]:
        return [worker for worker in self.workers.values() if worker.state in states]


def _for_placement(report: NodeReport) -> tuple[object, ...]:
    """All that placement reads. It keeps what it computed for a report as long as it is handed the very same one."""
    return report.devices, report.links, report.facts, report.container_trouble, report.contains_all


def window_for(view: RevisionView, span_s: float, held: int, now: float) -> Peak:
    """The window of what was wanted. It begins with the workers that are there: a restarted controller has no history,
    and that is no reason to stop what runs."""
    if view.want is None:
        view.want = Peak(span_s)
        view.want.record(now, held)
    return view.want


def _median(seconds: Collection[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def is_duration(seconds: float) -> bool:
    """What others count is not always a number, and one that is none would stay in every average."""
    return math.isfinite(seconds) and seconds >= 0
