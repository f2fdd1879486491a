"""Workers of one Revision on this node, from the first connection to their end.

1. `add`: the runner listens; the process connects and becomes READY, or fails to start, or is late (`tick`).
2. `apply`: the worker drains, parks or resumes as its Assignment demands, once it is empty (`slot_freed`).
3. Its socket closes, or it is retired, or 4. `remove`: its Assignment is deleted.
5. Its attempts end when its process is known to be dead (the state machine waits for the report).

Before a worker ends or parks, it leaves its seat at the GPU. Otherwise the end of a running attempt would start a
waiting one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import cast

from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import (
    EXIT_REPORT_WITHIN_S,
    Assignment,
    Cause,
    ColdStart,
    Desired,
    StartFailure,
    WorkerState,
)
from gpufn_core.errors import ErrorInfo, WorkerLost
from gpufn_core.protocol.frames import Unfinished
from gpufn_core.protocol.launch import LAST_CALL_S, RECONNECT_S
from gpufn_core.protocol.reports import WorkerEventKind
from gpufn_platform.process.clock import Clock
from gpufn_runtime.runner.agent_events import AgentEvents
from gpufn_runtime.runner.core import events
from gpufn_runtime.runner.core.views import WorkerView
from gpufn_runtime.runner.workers.nested_calls import NestedCalls
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.worker_link import WorkerLink

# Each call needs these, and Python looks up a member of an enum slowly.
_DRAINING, _PARKING = WorkerState.DRAINING, WorkerState.PARKING
# After a process closed its socket: a killed agent is back, and has checked which processes ended meanwhile.
EXPLAINED_WITHIN_S = EXIT_REPORT_WITHIN_S + 2.0
# After the runner hung up on a process that runs: without a runner it looks for one, and then ends itself.
ENDS_ITSELF_WITHIN_S = RECONNECT_S + LAST_CALL_S + 2.0


@dataclass(eq=False, repr=False)
class Workers:
    """Workers of one revision. `links` are the workers by id; `dispatch(event)` feeds the state machine.

    `on_change()` is called when a worker's state changes. `poll_queues()` is called when a worker accepts calls,
    because calls may wait for which no credit is granted.
    """

    revision: Revision
    links: dict[str, WorkerLink]
    _: KW_ONLY
    dispatch: Callable[[events.Event], None]
    on_unfinished: Callable[[WorkerLink, tuple[Unfinished, ...]], None]
    poll_queues: Callable[[], None]
    log_failure: Callable[[WorkerLink, ErrorInfo | None], None]
    agent_events: AgentEvents
    nested: NestedCalls
    output: Output
    clock: Clock
    on_change: Callable[[], None]

    async def add(self, link: WorkerLink) -> None:
        """Listen for the worker. Raises OSError."""
        self.links[link.id] = link
        await link.listen(self.clock.monotonic())

    def remove(self, worker: str) -> None:
        """Remove a worker without Assignment. Its process may live: Assignments of a silent node are deleted too."""
        link = self.links.pop(worker, None)
        if link is not None:
            self._leave_gpu(link)
            if link.attempts and worker not in self.agent_events.exits:
                self._retire(link, "its assignment was deleted")
            else:
                self._release(link)
            link.remove_socket()
            self.dispatch(events.WorkerLost(link, ENDS_ITSELF_WITHIN_S))

    def close(self) -> None:
        """Disconnect from the workers, which live on and connect to the next runner."""
        for link in self.links.values():
            self._leave_gpu(link)
            link.close()

    def tick(self, now: float) -> None:
        """End workers that are not ready, parked or resumed in time. Called each second."""
        startup_timeout_s = self.revision.spec.startup_timeout_s
        for link in list(self.links.values()):
            timeout_s = max(startup_timeout_s, RECONNECT_S) if link.is_inherited else startup_timeout_s
            if link.state is WorkerState.STARTING and now - link.listening_since > timeout_s:
                self.on_start_failed(link, "load", WorkerLost(f"it was not ready after {startup_timeout_s:g} s").info())
            elif link.requested_at is not None and now - link.requested_at > startup_timeout_s:
                phase = "park" if link.state is WorkerState.PARKING else "resume"
                self.on_start_failed(
                    link, phase, WorkerLost(f"it did not {phase} within {startup_timeout_s:g} s").info()
                )

    # --- commands -----------------------------------------------------------------------------------------------------

    def apply(self, assignment: Assignment) -> None:
        """Bring the worker to the state that its Assignment demands."""
        if (link := self.links.get(assignment.worker)) is None:
            return
        link.cause = assignment.cause
        match assignment.desired:
            case Desired.RUN:
                link.resume(self.clock.monotonic())
                self.dispatch(events.CapacityIncreased())
            case Desired.PARK:
                link.park_bytes = assignment.park_bytes
                link.park(self.clock.monotonic())
                self.dispatch(events.CapacityDecreased())
            case Desired.DRAIN:
                self._drain(link)

    def slot_freed(self, worker: WorkerView) -> None:
        """Carry out a pending drain or park request when the worker is empty."""
        link = cast("WorkerLink", worker)
        if not link.slots.in_use:
            link.idle_since = self.clock.monotonic()
            if link.slots.poisoned:
                self._retire(link, "a call did not end in time")
        if link.state is _DRAINING:
            link.drain()
        elif link.state is _PARKING:
            link.park(self.clock.monotonic())

    def _drain(self, link: WorkerLink) -> None:
        if link.state is WorkerState.STARTING and not link.is_inherited:
            self._retire(link, "it is no longer wanted, and has not started yet")
        else:
            link.drain()
            self.dispatch(events.CapacityDecreased())

    def _retire(self, link: WorkerLink, reason: str) -> None:
        self._release(link)
        self.agent_events.kill(link.id, reason)

    def _release(self, link: WorkerLink) -> None:
        """Close the connection to the worker, and cancel its nested calls."""
        self.nested.close_all(link)
        self._leave_gpu(link)
        link.close()
        self.dispatch(events.CapacityDecreased())

    def _leave_gpu(self, link: WorkerLink) -> None:
        if link.seat is not None:
            self.dispatch(events.TurnsRevoked(link.seat.remove_waiting()))
            link.seat.leave()

    # --- events of links ----------------------------------------------------------------------------------------------

    def on_ready(self, link: WorkerLink) -> None:
        if link.ready_at is None:
            link.ready_at = since = self.clock.time()
            link.idle_since = None if link.slots.in_use else self.clock.monotonic()
            if link.requested_at is not None:
                link.cold_start = ColdStart(resume_s=self.clock.monotonic() - link.requested_at)
            elif link.was_ready:  # under the previous runner: its cold start is long over
                link.cold_start = None
                since = 0.0
            else:
                link.cold_start = self.agent_events.cold_start(link)
            link.requested_at = None
            self.dispatch(events.WorkerReady(link, since))
            if link.cold_start is not None:
                self.agent_events.event(link, WorkerEventKind.READY)
        if link.seat is not None:
            link.seat.join()
        if link.park_requested:
            link.park(self.clock.monotonic())
        self.on_change()
        self.dispatch(events.CapacityIncreased())
        self.poll_queues()

    def on_start_failed(self, link: WorkerLink, phase: str, error: ErrorInfo) -> None:
        if link.state in (WorkerState.STARTING, WorkerState.PARKING, WorkerState.RESUMING):
            # First: the worker exits when the link closes, and the agent's report of that has fewer details.
            self.agent_events.event(link, WorkerEventKind.START_FAILED, failure=StartFailure(phase, error))
            link.close(WorkerState.FAILED)
            self._retire(link, "it failed to start")
            self.log_failure(link, error)
            self.on_change()

    def on_parked(self, link: WorkerLink) -> None:
        """Handle a parked worker, and carry out requests that were made meanwhile."""
        self._leave_gpu(link)
        if link.idle_since is None:
            link.idle_since = self.clock.monotonic()
        self.on_change()
        if link.drain_requested:
            link.drain()
        elif not link.park_requested:
            link.resume(self.clock.monotonic())

    def on_not_parked(self, link: WorkerLink, error: ErrorInfo, needs_bytes: int) -> None:
        """Drain the worker, as if it had received no request to park."""
        self.output.publish(link, None, "error", f"not parked: {error.traceback or error.message}".encode())
        failure = StartFailure("park", error)
        self.agent_events.event(link, WorkerEventKind.NOT_PARKED, failure=failure, needs_bytes=needs_bytes)
        self._drain(link)
        self.on_change()

    def on_draining(self, link: WorkerLink) -> None:
        """Drain a worker that requested it. It knows the cause."""
        link.cause = None
        self._drain(link)
        self.on_change()

    def on_spent(self, link: WorkerLink) -> None:
        """Drain a worker that has begun the last call that it may run."""
        link.cause = Cause.MAX_CALLS
        self._drain(link)
        self.on_change()

    def on_lost(self, link: WorkerLink, reason: str, *, runs_on: bool) -> None:
        """Handle a closed socket. If the worker had attempts or was wanted, its exit is awaited before callers get an
        error. `runs_on`: the runner closed the socket, and the process lives."""
        self._leave_gpu(link)
        if link.state is WorkerState.DRAINING and not link.attempts:
            self._release(link)  # as requested; its @exit hooks run within the agent's grace period
        else:
            self._retire(link, reason)
        self.on_change()
        self.dispatch(events.WorkerLost(link, ENDS_ITSELF_WITHIN_S if runs_on else EXPLAINED_WITHIN_S))
