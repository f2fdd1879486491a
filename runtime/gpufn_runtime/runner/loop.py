"""Main loop of the runner.

1. A new Assignment: the link listens on the worker's socket, while the agent launches the process.
2. `desired` becomes drain: the link takes no new calls and ends its worker when it is empty.
3. The Assignment is deleted: the link is closed, and the queue too when it has no attempts left.
4. Each second: watchdogs and a report. A change of a worker's state is reported at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import cast

import msgspec

from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import Assignment
from gpufn_core.errors import GpufnError
from gpufn_core.home import Home
from gpufn_core.protocol import frames, subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import CallInput, Cancel, StreamCredit, unpack_input
from gpufn_core.protocol.reports import DeviceReport, FunctionTotals, RunnerReport, TotalsReport, WorkerReport
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.pause_detector import PauseDetector
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.queue import wakeups
from gpufn_platform.queue.caller import Caller
from gpufn_platform.traces.reporter import SpanReporter
from gpufn_platform.volume_store.store import VolumeStore
from gpufn_runtime.runner.agent_events import AgentEvents
from gpufn_runtime.runner.attempts.attempt_index import Attempts
from gpufn_runtime.runner.attempts.metering import Meter
from gpufn_runtime.runner.attempts.settle import Settler
from gpufn_runtime.runner.attempts.start_log import StartLog
from gpufn_runtime.runner.attempts.tracing import Tracing
from gpufn_runtime.runner.circuits import Circuits
from gpufn_runtime.runner.directory import Directory
from gpufn_runtime.runner.dispatch.fast_path import FastPathServer
from gpufn_runtime.runner.dispatch.large_bodies import NodeBodies
from gpufn_runtime.runner.dispatch.revision_queue import RevisionQueue
from gpufn_runtime.runner.gpu.gpu_turns import NodeTurns
from gpufn_runtime.runner.queues import Queues
from gpufn_runtime.runner.recovery.abandoned_calls import AbandonedCalls
from gpufn_runtime.runner.recovery.call_lookup import CallLookup
from gpufn_runtime.runner.recovery.reconnect_check import ReconnectCheck
from gpufn_runtime.runner.totals import Totals
from gpufn_runtime.runner.variants import Variants
from gpufn_runtime.runner.workers.data_requests import DataRequests
from gpufn_runtime.runner.workers.nested_calls import NestedCalls
from gpufn_runtime.runner.workers.output import Output
from gpufn_runtime.runner.workers.relay import Relay
from gpufn_runtime.runner.workers.shared_bodies import NodeSharedBodies
from gpufn_runtime.runner.workers.worker_link import WorkerLink
from gpufn_runtime.runner.workers.worker_profiles import WorkerProfiles

log = logging.getLogger(__name__)

_TICK_S = 1.0
_TOTALS_INTERVAL_S = 3.0

_assignment = msgspec.msgpack.Decoder(Assignment)
_cancel = msgspec.msgpack.Decoder(Cancel)
_credit = msgspec.msgpack.Decoder(StreamCredit)
_device_report = msgspec.msgpack.Decoder(DeviceReport)


class Runner:
    """Runner of one node. `name` must be unique among all runners, past and present."""

    def __init__(
        self,
        bus: Bus,
        *,
        name: str,
        node: str,
        home: Home,
        clock: Clock,
        turns: NodeTurns,
        volume_files: VolumeStore,
    ) -> None:
        self._bus = bus
        self._assignments = KeyValue(bus, subjects.ASSIGNMENTS)
        self._name = name
        self._node = node
        self._home = home
        self._clock = clock
        self._turns = turns
        self._attempts = Attempts()
        self._queues = Queues(self._attempts)
        self._fast_path = FastPathServer(home.fast_path_socket, self._queues.offer, self._queues.withdraw)
        self._directory = Directory(
            KeyValue(bus, subjects.FUNCTIONS),
            KeyValue(bus, subjects.REVISIONS),
            KeyValue(bus, subjects.TEAMS),
            Variants(bus, clock),
        )
        self._caller = Caller(bus, name=f"{subjects.RUNNER_CALLERS}.{name}", clock=clock)
        self._totals = Totals()
        self._agent_events = AgentEvents(bus, node, clock, self._totals)
        self._shared_bodies = NodeSharedBodies(home.shared_bodies, f"r-{name}")
        self._bodies = NodeBodies(bus, self._shared_bodies)
        self._removals = Tasks("removal of shared bodies")
        self._meter = Meter(KeyValue(bus, subjects.USAGE), node, clock)
        self._start_log = StartLog(bus, node, clock)
        self._settler = Settler(bus, clock, self._shared_bodies, self._bodies, self._start_log, totals=self._totals)
        self._tracing = Tracing(SpanReporter(bus, f"runner {node}"), node, clock)
        self._circuits = Circuits(bus, self._caller, clock)
        data = DataRequests(bus, self._shared_bodies, volume_files, self._directory.team_of)
        self._nested = NestedCalls(
            bus, self._caller, self._directory, self._circuits, clock,
            shared_bodies=self._shared_bodies, bodies=self._bodies, data=data,
        )  # fmt: skip
        self._output = Output(bus, clock, node)
        self._profiles = WorkerProfiles(bus, node, self._ready_worker)
        self._relay = Relay(
            bus, output=self._output, nested=self._nested, inbox=subjects.runner_inbox(name),
            cancel=self._queues.cancel, traced=self._profiles.on_traced,
        )  # fmt: skip
        self._abandoned_calls = AbandonedCalls(bus, self._attempts, self._queues.cancel_call, clock)
        self._reconnect_check = ReconnectCheck(bus, self._attempts, self._queues.cancel_call)
        self._call_lookup = CallLookup(
            bus, node, self._attempts, self._settler.unsettled, repeat_reply=self._settler.replies.repeat
        )
        self._pauses = PauseDetector(clock.monotonic())
        self._started_at = clock.time()
        self._reported_totals: tuple[FunctionTotals, ...] = ()
        self._totals_due_at = 0.0  # monotonic
        self._is_starting = True  # until the initial assignments are received
        self._initial_workers: set[str] = set()  # workers that were assigned before this runner started
        self._desired: dict[str, Assignment] = {}
        self._attaching: dict[str, asyncio.Task[None]] = {}
        self._attach_retries: set[str] = set()

    async def run(self) -> None:
        """Run until cancelled; then wait until finished calls are stored."""
        self._caller.start(shared_folder=self._shared_bodies.own, drop=self._shared_bodies.drop_result)
        self._agent_events.start()
        self._circuits.start()
        self._reconnect_check.start()
        self._call_lookup.start()
        self._profiles.start()
        self._bus.subscribe(subjects.runner_inbox(self._name), self._on_credit)
        self._bus.subscribe(subjects.CANCELS, self._on_cancel)
        self._bus.subscribe(subjects.WAKEUPS, self._on_wakeup)
        self._bus.subscribe(subjects.device_report(self._node), self._on_device_report)
        await self._directory.open()
        await self._fast_path.open()
        watch = await self._assignments.watch(self._on_assignment, prefix=f"{self._node}.")
        self._is_starting = False
        self._home.claim_shared_bodies()
        self._shared_bodies.keep_only(set(self._desired))
        self._shared_bodies.open()
        metering = asyncio.get_running_loop().create_task(self._meter.run(), name="meter")
        try:
            while True:
                try:
                    self.step(self._clock.monotonic())
                except Exception:
                    log.exception("a step failed; next step in %g s", _TICK_S)
                await asyncio.sleep(_TICK_S)
        finally:
            watch.stop()
            with contextlib.suppress(GpufnError):
                await self._bus.flush()  # receives worker events that the agent has already sent
            self._fast_path.close()
            for queue in self._queues.values():
                queue.close()
            await self._settler.finish()
            self._tracing.finish()
            self._shared_bodies.close()
            metering.cancel()
            await asyncio.wait([metering])

    def step(self, now: float) -> None:
        workers, self._attach_retries = self._attach_retries, set()
        for worker in workers:
            if (assignment := self._desired.get(worker)) is not None:
                self._start_to_attach(assignment)
            else:
                self._detach(worker)  # it was unassigned before it was attached
        self._reconnect_check.tick()
        self._settler.tick(now)
        if self._pauses.next(now) is not None:
            self._caller.tick(now)
            self._abandoned_calls.tick(now)
            for queue in self._queues.values():
                queue.tick(now)
        for queue in list(self._queues.values()):
            self._close_if_empty(queue)
        self._fast_path.send_heartbeat()
        self.report()
        self._report_totals(now)

    def _ready_worker(self, worker: str) -> WorkerLink | None:
        links = (queue.workers.links.get(worker) for queue in self._queues.values())
        return next((link for link in links if link is not None and link.ready_at is not None), None)

    def report(self) -> None:
        sent_at, now = self._clock.time(), self._clock.monotonic()
        links = [link for queue in self._queues.values() for link in queue.workers.links.values()]
        workers = tuple(
            WorkerReport(
                worker=link.id,
                function=link.revision.function,
                revision=link.revision.number,
                state=link.state,
                slots=link.slots.total,
                in_use=link.slots.in_use,
                left_over=link.left_over(now),
                poisoned=link.slots.poisoned,
                idle_since=None if link.idle_since is None else sent_at - (now - link.idle_since),
                cold_start=link.cold_start,
                modules=link.modules,
                waits_for_own=link.waits_for_own,
                waits_on="" if link.seat is None else link.seat.waits_on,
                parked=link.parked,
                longest_call="" if longest is None else longest.message.id,
                longest_call_at=None if longest is None else longest.run.started_at,
            )
            for link, longest in ((link, link.longest_attempt) for link in links)
        )
        traffic = tuple(queue.traffic() for queue in self._queues.values())
        self._totals.add_traffic(traffic)
        report = RunnerReport(self._node, self._name, sent_at, workers, traffic, self._settler.dropped_outcomes)
        try:
            self._bus.publish(subjects.runner_report(self._node), encode(report))
        except GpufnError as error:
            log.warning("cannot publish the report: %s", error)

    def _report_totals(self, now: float) -> None:
        """Report the totals if they changed, and otherwise from time to time: a gateway may have just started."""
        totals = self._totals.report()
        if totals == self._reported_totals and now < self._totals_due_at:
            return
        report = TotalsReport(
            self._node, self._name, self._started_at, self._clock.time(), totals, self._output.dropped_lines
        )
        with contextlib.suppress(GpufnError):  # the next report follows
            self._bus.publish(subjects.totals_report(self._node), encode(report))
            self._reported_totals, self._totals_due_at = totals, now + _TOTALS_INTERVAL_S

    # --- assignments --------------------------------------------------------------------------------------------------

    def _on_assignment(self, key: str, entry: Entry | None) -> None:
        worker = key.partition(".")[2]
        if entry is None:
            self._desired.pop(worker, None)
            self._initial_workers.discard(worker)
            self._detach(worker)
            return
        assignment = _assignment.decode(entry.value)
        if assignment.rank:
            return  # it takes its calls from rank 0 of its gang
        previous = self._desired.get(worker)
        if previous is not None and assignment.epoch < previous.epoch:
            log.warning("refused an assignment of worker %s: epoch %d is old", worker, assignment.epoch)
            return
        self._desired[worker] = assignment
        if previous is None:
            if self._is_starting:
                self._initial_workers.add(worker)
            self._start_to_attach(assignment)
        elif (queue := self._queues.get((assignment.function, assignment.revision))) is not None:
            queue.workers.apply(assignment)
            self.report()

    def _start_to_attach(self, assignment: Assignment) -> None:
        worker = assignment.worker
        task = asyncio.get_running_loop().create_task(self._attach(assignment), name=f"attach {worker}")
        self._attaching[worker] = task
        task.add_done_callback(lambda _: self._attaching.pop(worker, None))

    async def _attach(self, assignment: Assignment) -> None:
        try:
            revision = await self._directory.revision(assignment.function, assignment.revision)
            queue = self._queues.get(revision.key)
            if queue is None:
                queue = self._open_queue(revision)
            link = WorkerLink(
                assignment.worker,
                revision,
                self._home.worker_socket(assignment.worker),
                owner=queue.workers,
                relay=self._relay.handle,
                created_at=assignment.created_at,
                seat=self._turns.seat(assignment.function, assignment.share),
                gpus=assignment.share.gpus,
                gpus_charged=assignment.gpus_charged,
                is_inherited=assignment.worker in self._initial_workers,
            )
            await queue.workers.add(link)
        except (GpufnError, OSError) as error:
            log.error("cannot serve worker %s yet: %s", assignment.worker, error)
            self._attach_retries.add(assignment.worker)
            return
        desired = self._desired.get(assignment.worker)
        if desired is None:
            self._detach(assignment.worker)
        else:
            queue.workers.apply(desired)

    def _open_queue(self, revision: Revision) -> RevisionQueue:
        queue = RevisionQueue(
            self._bus, revision, clock=self._clock, settler=self._settler, start_log=self._start_log,
            tracing=self._tracing, agent_events=self._agent_events, nested=self._nested,
            abandoned_calls=self._abandoned_calls, output=self._output, attempts=self._attempts,
            shared_bodies=self._shared_bodies, bodies=self._bodies, meter=self._meter, on_change=self.report,
            on_limit=self._fast_path.set_limit, on_start=self._call_lookup.announce_start,
        )  # fmt: skip
        self._queues[revision.key] = queue
        return queue

    def _detach(self, worker: str) -> None:
        for queue in list(self._queues.values()):
            if worker in queue.workers.links:
                queue.workers.remove(worker)
                self._close_if_empty(queue)
        self._output.forget(worker)
        # An earlier runner may have left files there. In a thread, because a worker may have created a million files.
        self._removals.start(asyncio.to_thread(self._shared_bodies.forget, worker))
        self.report()

    def _close_if_empty(self, queue: RevisionQueue) -> None:
        if queue.is_empty:
            self.report()  # for the last time with this queue's counters
            queue.close()
            del self._queues[queue.revision.key]

    # --- messages -----------------------------------------------------------------------------------------------------

    def _on_credit(self, message: Message) -> None:
        if message.payload[:1] == b"\0":  # packed: a credit is an array
            self._on_input(*unpack_input(message.payload))
            return
        credit = _credit.decode(message.payload)
        attempt = self._attempts.get(credit.invocation)
        if attempt is not None and attempt.begun is not None and (items := attempt.begun.grant(credit.taken)):
            cast("WorkerLink", attempt.worker).send(frames.Credit(attempt.number, items))

    def _on_input(self, event: CallInput, payload: bytes) -> None:
        attempt = self._attempts.get(event.invocation)
        if attempt is not None and attempt.begun is not None:
            cast("WorkerLink", attempt.worker).send(frames.Input(attempt.number, event.number), payload)

    def _on_cancel(self, message: Message) -> None:
        self._queues.cancel_all(_cancel.decode(message.payload).invocation)

    def _on_device_report(self, message: Message) -> None:
        links = [link for queue in self._queues.values() for link in queue.workers.links.values() if link.gpus]
        running = [attempt for link in links for attempt in link.attempts.values()]
        self._meter.count_energy(_device_report.decode(message.payload).devices, running)

    def _on_wakeup(self, message: Message) -> None:
        function, queue = message.subject.rpartition(".")[2], wakeups.queue_of(message.payload)
        if queue is not None:
            self._queues.on_wakeup(function, queue)
