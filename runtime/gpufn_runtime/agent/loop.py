"""The agent: makes this node's workers match its Assignments. The only module here that acts on what others decide.

when an Assignment or a report says so, and each second
    `reconcile` draws the conclusion; `launches` starts a worker, `running` ends it, `burials` removes what it leaves
each second
    NodeReport; the clock's skew, once a minute; workers that are overdue; what could not be sent or removed before;
    orphans
at start
    1. folders that an earlier agent left are read; 2. the watches tell what is assigned; 3. the living are adopted, the
    dead buried; 4. from then on changes are acted upon as they come
at the end, in this order
    1. nothing is launched any more; 2. SIGTERM to all, SIGKILL after the grace; 3. their Assignments are deleted;
    4. MPS daemons end; 5. templates end; 6. watches and subscriptions end
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterable
from typing import Protocol

import msgspec

from gpufn_core.domain.device import Health
from gpufn_core.domain.worker import Assignment, Desired, WorkerState
from gpufn_core.home import Home
from gpufn_core.protocol import subjects
from gpufn_core.protocol.messages import KillOrder
from gpufn_core.protocol.reports import RunnerReport
from gpufn_core.spec.image_spec import ImageSpec
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.storage.key_value import Entry, KeyValue
from gpufn_platform.process import grace_period
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.grace_period import GRACE_S
from gpufn_runtime.agent.cache.bundles import BundleCache
from gpufn_runtime.agent.cache.engines import EngineCache
from gpufn_runtime.agent.cache.prefetch import Preparation, Preparer
from gpufn_runtime.agent.clock_check import ClockCheck
from gpufn_runtime.agent.decide import reconcile
from gpufn_runtime.agent.decide.fleet import Fleet, Phase
from gpufn_runtime.agent.decide.reconcile import Drain, Forget, Kill, Launch, Refuse, Stop
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.mps.base import GpuShares
from gpufn_runtime.agent.reports import Readiness, Reports
from gpufn_runtime.agent.workers import processes, worker_folder
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from gpufn_runtime.agent.workers.cleanup import Burials
from gpufn_runtime.agent.workers.parking import Parking
from gpufn_runtime.agent.workers.running_workers import Living
from gpufn_runtime.agent.workers.start import Launches, WorkerLauncher
from gpufn_runtime.agent.workers.supervise import Running
from gpufn_runtime.agent.workers.takeover import Inheritance
from gpufn_runtime.agent.workers.worker_config import Orders
from gpufn_runtime.agent.workers.worker_folder import WorkerFolder

log = logging.getLogger(__name__)

_TICK_S = 1.0
_BURY_TIMEOUT_S = 5.0
_PARKED_PART = 4  # of the host's memory is for parked workers, unless the operator says how much

_assignment = msgspec.msgpack.Decoder(Assignment)
_kill_order = msgspec.msgpack.Decoder(KillOrder)
_runner_report = msgspec.msgpack.Decoder(RunnerReport)


class Standbys(WorkerLauncher, Preparer, Readiness, Protocol):
    """Starts workers, and is prepared for what is in use."""

    @property
    def pids(self) -> frozenset[int]: ...

    def take_over(self, containers: Iterable[str]) -> None: ...
    def leave_room(self, room_bytes: int) -> None: ...


class Agent:
    def __init__(
        self,
        *,
        node: str,
        home: Home,
        bus: Bus,
        assignments: KeyValue,
        functions: KeyValue,
        revisions: KeyValue,
        bundles: BundleCache,
        engines: EngineCache,
        launcher: Standbys,
        groups: MemoryGroups,
        devices: DeviceWatch,
        shares: GpuShares,
        clock: Clock,
        default_image: ImageSpec | None = None,
        open_files: int | None = None,
        supervisor_fifo: str = "",
        park_bytes: int | None = None,
        grace_s: float = GRACE_S,
        kill_after_s: float = reconcile.KILL_AFTER_S,
        drain_grace_s: float = reconcile.DRAIN_GRACE_S,
        tick_s: float = _TICK_S,
    ) -> None:
        self._node = node
        self._home = home
        self._bus = bus
        self._assignments = assignments
        self._bundles = bundles
        self._engines = engines
        self._launcher = launcher
        self._clock = clock
        self._grace_s = grace_s
        self._kill_after_s = kill_after_s
        self._drain_grace_s = drain_grace_s
        self._tick_s = tick_s
        self._devices = devices
        self._shares = shares
        self._fleet = Fleet()
        self._living = Living()
        self._clock_check = ClockCheck(bus, assignments.stream, node=node, clock=clock)
        self._reports = Reports(
            bus,
            node=node,
            devices=devices,
            living=self._living,
            readiness=launcher,
            clock=clock,
            clock_check=self._clock_check,
            contains_all=default_image is not None,
            park_bytes=devices.pool.memory_bytes // _PARKED_PART if park_bytes is None else park_bytes,
        )
        orders = Orders(home, devices, default_image, open_files, supervisor_fifo)
        self._preparation = Preparation(
            functions=functions,
            revisions=revisions,
            bundles=bundles,
            engines=engines,
            gpu_kinds=(device.kind for device in devices.gpus),
            launcher=launcher,
            running=self._fleet.revisions,
            image_of=orders.image,
            limits_of=orders.limits,
        )
        self._burials = Burials(
            self._fleet,
            node=node,
            assignments=assignments,
            groups=groups,
            buried=self._preparation.note_end,
            retry_s=tick_s,
        )
        self._running = Running(
            self._living,
            containers=launcher,
            shares=shares,
            burials=self._burials,
            reports=self._reports,
            doubt=self._preparation.doubt,
            clock=clock,
        )
        self._launches = Launches(
            home=home,
            orders=orders,
            preparation=self._preparation,
            devices=devices,
            shares=shares,
            groups=groups,
            launcher=launcher,
            running=self._running,
            burials=self._burials,
            reports=self._reports,
            clock=clock,
        )
        self._inheritance = Inheritance(self._fleet, self._running, self._burials, self._reports)
        self._parking = Parking(devices, self._living, self._running, self._reports)
        self._told_early: dict[str, Assignment] | None = {}  # until what an earlier agent left is dealt with
        self._is_stopping = False
        self._in_use: dict[str, int] = {}  # slots that calls of the queue are in, by worker

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event | None = None) -> None:
        """Work until `stop` is set, then end every worker: when its calls have finished, the grace period is over or
        `hurry` is set."""
        processes.become_subreaper()
        grace_period.forget_running(self._home)
        self._bundles.sweep()
        self._engines.sweep()
        left = worker_folder.all_folders(self._home)
        watches = [
            *await self._preparation.watch(),
            await self._assignments.watch(self._on_assignment, prefix=f"{self._node}."),
        ]
        await self._shares.take_over()
        self._take_over(left)
        subscriptions = [
            self._bus.subscribe(subjects.kill(self._node), self._on_kill_order),
            self._bus.subscribe(subjects.runner_report(self._node), self._on_runner_report),
        ]
        self._devices.start(self._reports.send_metrics, self._parking.prove)
        kept = [
            asyncio.create_task(self._preparation.run(), name="prepare"),
            asyncio.create_task(self._shares.run(self._end_for_its_gpu), name="shares"),
        ]
        log.info("node %s is ready: devices=%s", self._node, ",".join(self._uuids()))
        try:
            while not stop.is_set():
                try:
                    self.step(self._clock.monotonic())
                except Exception:
                    log.exception("a step failed; the next one follows in %g s", self._tick_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._tick_s):
                        await stop.wait()
            await self._shut_down(hurry or asyncio.Event())
        finally:
            # After an error the workers live on, for the next agent to adopt.
            for task in kept:
                task.cancel()
            self._devices.stop()
            self._clock_check.cancel()
            self._launches.cancel()
            self._burials.cancel()
            self._running.let_go()
            for watch in watches:
                watch.stop()
            for subscription in subscriptions:
                subscription.unsubscribe()

    def step(self, now: float) -> None:
        """What is done each second."""
        self._clock_check.step(now)
        self._reports.send()
        self._leave_failed_devices(now)
        self._leave_room()
        for record in list(self._fleet.records.values()):
            self._act(reconcile.when_overdue(record, now, self._kill_after_s))
        self._running.step(now)
        self._reports.send_unsent()
        self._burials.step()
        self._reap_strangers()

    def _leave_room(self) -> None:
        """What no worker has a lease on is for standbys."""
        shares = [record.assignment.share for record in self._fleet.records.values() if record.assignment is not None]
        self._launcher.leave_room(self._devices.pool.memory_bytes - sum(share.memory_bytes for share in shares))

    def _leave_failed_devices(self, now: float) -> None:
        for device in self._devices.devices(now):
            if device.health is Health.FAILED:
                for record in list(self._fleet.records.values()):
                    if device.uuid in record.gpus:
                        self._end_for_its_gpu(record.worker, f"{device.uuid}: {device.health_reason}")

    def _end_for_its_gpu(self, worker: str, reason: str) -> None:
        record = self._fleet.records.get(worker)
        if record is not None and not record.killed:
            record.device_fault = reason
            self._act(Kill(worker, reason))

    # --- what the bus says --------------------------------------------------------------------------------------------

    def _on_assignment(self, key: str, entry: Entry | None) -> None:
        worker = key.rpartition(".")[2]
        assignment = _assignment.decode(entry.value) if entry else None
        if self._told_early is not None:
            if assignment is None:
                self._told_early.pop(worker, None)
            else:
                self._told_early[worker] = assignment
            return
        if not self._is_stopping:
            self._consider(worker, assignment)

    def _consider(self, worker: str, assignment: Assignment | None) -> None:
        record = self._fleet.records.get(worker)
        action = reconcile.on_change(
            record, assignment, newest_epoch=self._fleet.newest_epoch, has_ended=self._fleet.has_ended(worker)
        )
        if record is not None and not isinstance(action, Refuse):
            record.assignment = assignment
        self._act(action)

    def _on_kill_order(self, message: Message) -> None:
        order = _kill_order.decode(message.payload)
        if order.worker in self._fleet.records:
            self._act(Kill(order.worker, order.reason))

    def _on_runner_report(self, message: Message) -> None:
        report = _runner_report.decode(message.payload)
        self._in_use = {worker.worker: max(0, worker.in_use - worker.left_over) for worker in report.workers}
        for worker in report.workers:
            if (record := self._fleet.records.get(worker.worker)) is not None:
                if worker.state is WorkerState.READY:
                    record.was_ready = True
                    self._shares.is_ready(worker.worker)
                self._parking.note(record, worker)
                if worker.state.live:
                    record.given_up_at = None
                elif record.given_up_at is None:
                    record.given_up_at = self._clock.monotonic()
            self._preparation.learn_modules((worker.function, worker.revision), worker.modules)

    # --- acting -------------------------------------------------------------------------------------------------------

    def _act(self, action: reconcile.Action | None) -> None:
        match action:
            case Launch(assignment):
                record = self._fleet.add(assignment)
                self._leave_room()
                self._launches.start(record, assignment)
            case Drain(assignment):
                record = self._fleet.records[assignment.worker]
                if record.drain_by is None:
                    timeout_s = self._preparation.timeout_s(record.key)
                    record.drain_by = self._clock.monotonic() + timeout_s + self._drain_grace_s
            case Stop(worker, reason):
                self._running.end(self._fleet.records[worker], signal.SIGTERM, reason)
            case Kill(worker, reason):
                self._running.end(self._fleet.records[worker], signal.SIGKILL, reason)
            case Forget(assignment, reason):
                log.info("%s is forgotten: %s", assignment.worker, reason)
                self._burials.delete(assignment.worker)
            case Refuse(assignment, newest):
                log.warning("%s is refused: epoch %d is older than %d", assignment.worker, assignment.epoch, newest)
                if assignment.worker not in self._fleet.records:
                    self._burials.delete(assignment.worker)
            case None:
                pass

    def _reap_strangers(self) -> None:
        """Templates that have ended, and what workers left to us by dying. While a launch is under way, an unknown
        child may be the worker that is about to be known."""
        if self._launches or self._shares.is_asking:
            return
        known = {worker.process.pid for worker in self._living} | self._launcher.pids | self._shares.pids
        for pid in processes.children():
            if pid not in known:
                processes.reap(pid)

    # --- start and end ------------------------------------------------------------------------------------------------

    def _take_over(self, left: list[WorkerFolder]) -> None:
        """What an earlier agent left, then everything that is assigned."""
        assigned, self._told_early = self._told_early or {}, None
        self._inheritance.take_over(left, assigned)
        self._launcher.take_over(worker.container for worker in self._living if worker.container)
        for worker, assignment in assigned.items():
            record = self._fleet.records.get(worker)
            if record is None:
                self._consider(worker, assignment)
            elif record.phase is Phase.RUNNING and assignment.desired is Desired.DRAIN:
                self._act(Drain(assignment))

    async def _shut_down(self, hurry: asyncio.Event) -> None:
        self._is_stopping = True
        grace_period.set_running(self._home, self._calls_running())
        grace_s = grace_period.grace_s(self._home, self._grace_s)
        log.info("stopping: %d workers have %g s to finish their calls", len(self._living), grace_s)
        self._devices.rest("its node stops")
        self._reports.send()  # the controller places nothing here from now on
        for record in self._fleet.records.values():
            if record.phase is not Phase.GONE:
                record.stopping = True
                self._running.end(record, signal.SIGTERM, "the agent stops")
        await self._calls_finish(grace_s, hurry)
        self._launches.cancel()
        too_late = f"its node stops, and its calls did not finish within {grace_s:g} s"
        for worker in self._living:
            self._running.end(worker.record, signal.SIGKILL, too_late)
        try:
            async with asyncio.timeout(_BURY_TIMEOUT_S):
                await self._running.none_left()
                await self._running.all_told()
                await self._burials.done()
        except TimeoutError:
            log.warning("stopped with %d assignments not deleted: the next agent does it", len(self._burials))
        await self._shares.stop()
        grace_period.forget_running(self._home)

    async def _calls_finish(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Until no worker is left, or the time is over. Meanwhile the node reports, or it would be taken for dead and
        its calls would start elsewhere while they run here."""
        until = self._clock.monotonic() + grace_s
        gone = [asyncio.create_task(each) for each in (self._none_left(), hurry.wait())]
        try:
            while (left_s := until - self._clock.monotonic()) > 0:
                grace_period.set_running(self._home, self._calls_running())
                done, _ = await asyncio.wait(
                    gone, timeout=min(left_s, self._tick_s), return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    return
                self._devices.rest("its node stops")
                self._running.step(self._clock.monotonic())
                self._reports.send()
                self._reports.send_unsent()
        finally:
            for task in gone:
                task.cancel()

    async def _none_left(self) -> None:
        await self._launches.done()
        await self._running.none_left()

    def _calls_running(self) -> int:
        """On this node, as its runner reported last."""
        return sum(self._in_use.get(worker.record.worker, 0) for worker in self._living)

    def _uuids(self) -> list[str]:
        return [self._devices.pool.uuid, *(device.uuid for device in self._devices.gpus)]
