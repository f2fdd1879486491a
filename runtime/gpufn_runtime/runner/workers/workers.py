"""The workers of one Revision on this node, from the socket that the runner listens on to their end.

1. `add`: the runner listens; the process connects and is READY, or it fails to start, or is late (`tick`)
2. `obey`: it drains, parks or resumes as its Assignment desires, once nothing runs in it (`slot_freed`)
3. its socket closes, or it is retired, or 4. `remove`: its Assignment is gone
5. what ran in it ends when its process is known to be dead (unexplained.py)

Whatever it is that ends or parks a worker, its seat at the GPU is left first: the end of what runs there would begin
what waits.
"""

from __future__ import annotations

from collections.abc import Callable

from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import Assignment, ColdStart, Desired, StartFailure, WorkerState
from gpufn_core.errors import ErrorInfo, WorkerLost
from gpufn_core.protocol.launch import RECONNECT_S
from gpufn_core.protocol.reports import WorkerEventKind
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.agent_events import Supervision
from gpufn_runtime.runner.attempts.attempt import Attempt
from gpufn_runtime.runner.attempts.finish import Ends
from gpufn_runtime.runner.dispatch.arrivals import Arrivals
from gpufn_runtime.runner.dispatch.slots_and_backlog import Places
from gpufn_runtime.runner.gpu.turn_waits import Waits
from gpufn_runtime.runner.recovery.awaiting_exit import ENDS_ITSELF_WITHIN_S, EXPLAINED_WITHIN_S, Unexplained
from gpufn_runtime.runner.workers.nested_calls import NestedCalls
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.worker_link import WorkerLink


class Workers:
    """`on_change()`: a worker's state changed. `on_loss()`: attempts of one that is gone are `unexplained`."""

    def __init__(
        self,
        revision: Revision,
        places: Places,
        *,
        arrivals: Arrivals,
        waits: Waits,
        ends: Ends,
        unexplained: Unexplained,
        supervision: Supervision,
        nested: NestedCalls,
        output: Output,
        clock: Clock,
        on_change: Callable[[], None],
        on_loss: Callable[[], None],
    ) -> None:
        self._revision = revision
        self._places = places
        self._arrivals = arrivals
        self._waits = waits
        self._ends = ends
        self._unexplained = unexplained
        self._supervision = supervision
        self._nested = nested
        self._output = output
        self._clock = clock
        self._on_change = on_change
        self._on_loss = on_loss
        self.links = places.links

    async def add(self, link: WorkerLink) -> None:
        """Listen for it. Raises OSError."""
        self.links[link.worker] = link
        await link.listen(self._clock.monotonic())

    def remove(self, worker: str) -> None:
        """Its assignment is gone. Its process may run on: the controller deletes the assignments of a silent node."""
        link = self.links.pop(worker, None)
        if link is not None:
            self._leave_gpu(link)
            attempts = self._ends.take_all(link)
            if attempts and self._supervision.exit_of(worker) is None:
                self._retire(link, "its assignment is gone")
            else:
                self._let_go(link)
            link.remove_socket()
            self._explain(link, attempts, ENDS_ITSELF_WITHIN_S)

    def close(self) -> None:
        """Let them go on without us: they come back to our successor."""
        for link in self.links.values():
            self._leave_gpu(link)
            link.close()

    def tick(self, now: float) -> None:
        """Each second: those that do not get ready, parked, or ready again in time."""
        limit = self._revision.spec.startup_timeout_s
        for link in list(self.links.values()):
            within_s = max(limit, RECONNECT_S) if link.is_inherited else limit
            if link.state is WorkerState.STARTING and now - link.listening_since > within_s:
                self.on_start_failed(link, "load", WorkerLost(f"it was not ready after {limit:g} s").info())
            elif link.told_at is not None and now - link.told_at > limit:
                phase = "park" if link.state is WorkerState.PARKING else "resume"
                self.on_start_failed(link, phase, WorkerLost(f"it did not {phase} within {limit:g} s").info())

    # --- what is wanted of them ---------------------------------------------------------------------------------------

    def obey(self, assignment: Assignment) -> None:
        """Have its worker be as it is desired. What it is already, it stays."""
        if (link := self.links.get(assignment.worker)) is None:
            return
        match assignment.desired:
            case Desired.RUN:
                link.resume(self._clock.monotonic())
                self._arrivals.more_room()
            case Desired.PARK:
                link.park_bytes = assignment.park_bytes
                link.park(self._clock.monotonic())
                self._arrivals.less_room()
            case Desired.DRAIN:
                self._drain(link)

    def slot_freed(self, link: WorkerLink) -> None:
        """When nothing runs in it any more, it can do what it was told meanwhile."""
        if not link.slots.in_use:
            link.idle_since = self._clock.monotonic()
            if link.slots.poisoned:
                self._retire(link, "a call did not end in time")
        if link.state is WorkerState.DRAINING:
            link.drain()
        elif link.state is WorkerState.PARKING:
            link.park(self._clock.monotonic())

    def _drain(self, link: WorkerLink) -> None:
        if link.state is WorkerState.STARTING and not link.is_inherited:
            self._retire(link, "it is not wanted any more, and has not started yet")
        else:
            link.drain()
            self._arrivals.less_room()

    def _retire(self, link: WorkerLink, why: str) -> None:
        self._let_go(link)
        self._supervision.kill(link.worker, why)

    def _let_go(self, link: WorkerLink) -> None:
        """Hear nothing more of this worker; what it has asked of the platform goes with it."""
        self._nested.close_all(link)
        self._leave_gpu(link)
        link.close()
        self._arrivals.less_room()
        self._arrivals.serve_line()

    def _leave_gpu(self, link: WorkerLink) -> None:
        self._waits.hand_back(link)
        if link.seat is not None:
            link.seat.leave()

    # --- what their links tell ----------------------------------------------------------------------------------------

    def on_ready(self, link: WorkerLink) -> None:
        if link.ready_at is None:
            link.ready_at = since = self._clock.time()
            link.idle_since = None if link.slots.in_use else self._clock.monotonic()
            if link.told_at is not None:
                link.cold_start = ColdStart(resume_s=self._clock.monotonic() - link.told_at)
            elif link.was_ready:  # for the runner before us: its cold start is long over
                link.cold_start = None
                since = 0.0
            else:
                link.cold_start = self._supervision.cold_start(link)
            link.told_at = None
            self._places.became_ready(link, since)
            if link.cold_start is not None:
                self._supervision.event(link, WorkerEventKind.READY)
        if link.seat is not None:
            link.seat.join()
        if link.is_asked_to_park:
            link.park(self._clock.monotonic())
        self._on_change()
        self._arrivals.more_room()
        self._arrivals.look()

    def on_start_failed(self, link: WorkerLink, phase: str, error: ErrorInfo) -> None:
        if link.state in (WorkerState.STARTING, WorkerState.PARKING, WorkerState.RESUMING):
            link.close(WorkerState.FAILED)
            self._retire(link, "it failed to start")
            self._ends.log_failure(link, error)
            self._supervision.event(link, WorkerEventKind.START_FAILED, failure=StartFailure(phase, error))
            self._on_change()

    def on_parked(self, link: WorkerLink) -> None:
        """What was asked of it meanwhile counts."""
        self._leave_gpu(link)
        if link.idle_since is None:
            link.idle_since = self._clock.monotonic()
        self._on_change()
        if link.is_asked_to_drain:
            link.drain()
        elif not link.is_asked_to_park:
            link.resume(self._clock.monotonic())

    def on_not_parked(self, link: WorkerLink, error: ErrorInfo, needs_bytes: int) -> None:
        """It ends, as it would have without parking."""
        self._output.publish(link, "", "error", f"not parked: {error.traceback or error.message}".encode())
        failure = StartFailure("park", error)
        self._supervision.event(link, WorkerEventKind.NOT_PARKED, failure=failure, needs_bytes=needs_bytes)
        self.on_draining(link)

    def on_draining(self, link: WorkerLink) -> None:
        """Somebody else than the controller told it to end."""
        self._drain(link)
        self._on_change()

    def on_lost(self, link: WorkerLink, why: str, *, runs_on: bool) -> None:
        """Its socket closed. When it had work, or was wanted, find out why before its callers are told. `runs_on`: the
        runner closed the socket, and the process runs."""
        self._leave_gpu(link)
        attempts = self._ends.take_all(link)
        if link.state is WorkerState.DRAINING and not attempts:
            self._let_go(link)  # as told; its @exit hooks have the agent's grace
        else:
            self._retire(link, why)
        self._on_change()
        self._explain(link, attempts, ENDS_ITSELF_WITHIN_S if runs_on else EXPLAINED_WITHIN_S)

    def _explain(self, link: WorkerLink, attempts: list[Attempt], within_s: float) -> None:
        if attempts:
            self._unexplained.add(link, attempts, within_s)
            self._on_loss()
