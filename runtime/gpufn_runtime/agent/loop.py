"""The agent: makes this node's workers match its Assignments. The only module here that acts on what others decide.

an Assignment appears
    1. its Revision (watched), bundle and engines (brought here at deploy); its GPU made ready to be shared, or left by
    MPS; 2. folder, FIFO, config, memory group;
    3. a process, forked or cold; 4. a pidfd tells its end; `started` goes out
a process ends
    1. kill its group, reap it, read the rest of its output; 2. `exited` goes out, for a runner waits for it;
    3. folder and group are removed; 4. the Assignment is deleted, which frees its lease
each second
    NodeReport; workers that are overdue; what could not be sent or removed before; orphans
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
import os
import signal
from collections.abc import Iterable
from typing import Protocol

import msgspec

from gpufn.bus.connection import Bus, Message
from gpufn.bus.kv import Entry, KeyValue
from gpufn.clock import Clock
from gpufn.device import Health
from gpufn.errors import ErrorInfo, GpufnError, PlatformError
from gpufn.home import Home
from gpufn.image import ImageSpec
from gpufn.protocol import subjects
from gpufn.protocol.launch import EXIT_START_FAILED
from gpufn.protocol.messages import (
    KillOrder,
    ProcessReport,
    RunnerReport,
    WorkerEventKind,
    WorkerReport,
)
from gpufn.workers import Assignment, ColdStart, Desired, Exit, ParkedMemory, StartFailure, WorkerState
from gpufn_runtime.agent import folders, processes, reconcile
from gpufn_runtime.agent.bundles import BundleCache
from gpufn_runtime.agent.burials import Burials
from gpufn_runtime.agent.cgroups import MemoryGroup, MemoryGroups
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.engines import EngineCache
from gpufn_runtime.agent.fleet import Fleet, Phase, WorkerRecord
from gpufn_runtime.agent.folders import ProcessFile, WorkerFolder
from gpufn_runtime.agent.launchers.base import ContainerEnd, Launched, Launcher
from gpufn_runtime.agent.mps.base import GpuShares
from gpufn_runtime.agent.orders import Orders
from gpufn_runtime.agent.output import OutputLog
from gpufn_runtime.agent.preparation import Preparation, Preparer
from gpufn_runtime.agent.proofs import Claim, prove
from gpufn_runtime.agent.reconcile import Adopt, Bury, Drain, Forget, Found, Kill, Launch, Refuse, Stop
from gpufn_runtime.agent.reports import Reports
from gpufn_runtime.agent.running import RunningWorker, exit_of
from gpufn_runtime.agent.tasks import Tasks

log = logging.getLogger(__name__)

_TICK_S = 1.0
_READ_BYTES = 64 << 10
_LAST_READS = 32  # what a pipe can hold when its writer dies is far less than this many reads
_PARTIAL_LINE_S = 1.0
_BURY_TIMEOUT_S = 5.0
_PARKED_PART = 4  # of the host's memory is for parked workers, unless the operator says how much

_assignment = msgspec.msgpack.Decoder(Assignment)
_kill_order = msgspec.msgpack.Decoder(KillOrder)
_runner_report = msgspec.msgpack.Decoder(RunnerReport)


class Standbys(Launcher, Preparer, Protocol):
    """A launcher that prepares for what is in use, and looks after its containers."""

    @property
    def templates(self) -> tuple[str, ...]: ...

    @property
    def pids(self) -> frozenset[int]: ...

    @property
    def container_trouble(self) -> str: ...

    async def end_of(self, container: str) -> ContainerEnd: ...
    def take_over(self, containers: Iterable[str]) -> None: ...
    def let_go(self, container: str) -> None: ...
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
        park_bytes: int | None = None,
        stop_grace_s: float = 10.0,
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
        self._groups = groups
        self._clock = clock
        self._orders = Orders(home, devices, default_image)
        self._stop_grace_s = stop_grace_s
        self._kill_after_s = kill_after_s
        self._drain_grace_s = drain_grace_s
        self._tick_s = tick_s
        self._devices = devices
        self._shares = shares
        shares.end = self._end_for_its_gpu
        devices.on_sample = self._prove_parked
        self._fleet = Fleet()
        self._reports = Reports(
            bus,
            node=node,
            devices=lambda: devices.devices(clock.monotonic()),
            links=devices.links,
            facts=devices.facts,
            clock=clock,
            running=self._process_reports,
            templates=lambda: launcher.templates,
            container_trouble=lambda: launcher.container_trouble,
            contains_all=default_image is not None,
            park_bytes=devices.pool.memory_bytes // _PARKED_PART if park_bytes is None else park_bytes,
        )
        self._preparation = Preparation(
            functions=functions,
            revisions=revisions,
            bundles=bundles,
            engines=engines,
            gpu_kinds=(device.kind for device in devices.gpus),
            launcher=launcher,
            running=lambda: {(record.function, record.revision) for record in self._fleet.records.values()},
            image_of=self._orders.image,
            limits_of=self._orders.limits,
        )
        self._workers: dict[str, RunningWorker] = {}
        self._told_early: dict[str, Assignment] | None = {}  # until the folders of an earlier agent are dealt with
        self._is_stopping = False
        self._launches = Tasks()
        self._endings = Tasks()
        self._burials = Burials(
            node=node, assignments=assignments, groups=groups, buried=self._on_buried, retry_s=tick_s
        )
        self._one_gone = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then end every worker."""
        self._loop = asyncio.get_running_loop()
        processes.become_subreaper()
        self._bundles.sweep()
        self._engines.sweep()
        left = folders.all_folders(self._home)
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
        self._devices.start(self._reports.send_metrics)
        kept = [
            asyncio.create_task(self._preparation.run(), name="prepare"),
            asyncio.create_task(self._shares.run(), name="shares"),
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
            await self._shut_down()
        finally:
            # After an error the workers live on, for the next agent to adopt.
            for task in kept:
                task.cancel()
            self._devices.stop()
            self._let_go()
            for watch in watches:
                watch.stop()
            for subscription in subscriptions:
                subscription.unsubscribe()

    def step(self, now: float) -> None:
        """What is done each second."""
        self._reports.send()
        self._leave_failed_devices(now)
        self._leave_room()
        for record in list(self._fleet.records.values()):
            self._act(reconcile.when_overdue(record, now, self._kill_after_s))
        for worker in self._workers.values():
            self._reports.log_lines(worker.record, worker.output.flush(now, older_than_s=_PARTIAL_LINE_S))
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
        for worker in _runner_report.decode(message.payload).workers:
            if (record := self._fleet.records.get(worker.worker)) is not None:
                if worker.state is WorkerState.READY:
                    self._shares.is_ready(worker.worker)
                self._note_parked(record, worker)
                if worker.state.live:
                    record.given_up_at = None
                elif record.given_up_at is None:
                    record.given_up_at = self._clock.monotonic()
            self._preparation.learn_modules((worker.function, worker.revision), worker.modules)

    def _note_parked(self, record: WorkerRecord, report: WorkerReport) -> None:
        if report.state in (WorkerState.READY, WorkerState.RESUMING):
            record.claim = record.parked = None
        elif report.state is WorkerState.PARKED and report.parked is not None and record.claim is None:
            # Without a GPU there is nothing to look at.
            record.claim = Claim(report.parked, self._devices.begun if record.gpus else -1)
            self._devices.hurry()
            self._prove_parked()

    def _prove_parked(self) -> None:
        for worker in list(self._workers.values()):
            record = worker.record
            if record.claim is None or record.parked is not None:
                continue
            held = self._devices.held_by(worker.pids, record.gpus)
            match prove(record.claim, self._devices.seen, max(held.values(), default=None)):
                case ParkedMemory() as parked:
                    record.parked = parked
                    log.info("%s is parked: host=%d left=%d", record.worker, parked.host_bytes, parked.device_bytes)
                    self._reports.send_soon()
                case str(reason) if record.asked_to_end_at is None:
                    self._act(Stop(record.worker, reason))

    # --- acting -------------------------------------------------------------------------------------------------------

    def _act(self, action: reconcile.Action | None) -> None:
        match action:
            case Launch(assignment):
                record = self._fleet.add(assignment)
                self._leave_room()
                self._launches.start(self._launch(record, assignment), f"launch-{record.worker}")
            case Drain(assignment):
                record = self._fleet.records[assignment.worker]
                if record.drain_by is None:
                    timeout_s = self._preparation.timeout_s(record.function, record.revision)
                    record.drain_by = self._clock.monotonic() + timeout_s + self._drain_grace_s
            case Stop(worker, reason):
                self._end(self._fleet.records[worker], signal.SIGTERM, reason)
            case Kill(worker, reason):
                self._end(self._fleet.records[worker], signal.SIGKILL, reason)
            case Forget(assignment, reason):
                log.info("%s is forgotten: %s", assignment.worker, reason)
                self._burials.delete(assignment.worker)
            case Refuse(assignment, newest):
                log.warning("%s is refused: epoch %d is older than %d", assignment.worker, assignment.epoch, newest)
                if assignment.worker not in self._fleet.records:
                    self._burials.delete(assignment.worker)
            case None:
                pass

    def _end(self, record: WorkerRecord, how: signal.Signals, reason: str) -> None:
        """A worker that is being launched is ended as soon as it has a process."""
        log.info("%s gets %s: %s", record.worker, how.name, reason)
        if record.asked_to_end_at is None:
            record.asked_to_end_at = self._clock.monotonic()
        record.killed = record.killed or how is signal.SIGKILL
        worker = self._workers.get(record.worker)
        if worker is None:
            return
        if how is signal.SIGKILL and record.shares_by_mps:
            self._endings.start(self._evict_and_kill(worker), f"evict-{record.worker}")
        else:
            worker.signal(how)

    async def _evict_and_kill(self, worker: RunningWorker) -> None:
        await self._shares.evict(worker.record.worker, worker.pids)
        if self._workers.get(worker.record.worker) is worker:
            worker.signal(signal.SIGKILL)

    async def _launch(self, record: WorkerRecord, assignment: Assignment) -> None:
        folder = WorkerFolder(self._home.worker(record.worker))
        launched_at, began = self._clock.time(), self._clock.monotonic()
        group: MemoryGroup | None = None
        try:
            revision = await self._preparation.revision(record.function, record.revision)
            bundle = await self._preparation.bundle(revision)
            engines = await self._preparation.engines(revision, self._orders.kind(assignment))
            if record.asked_to_end_at is not None:
                self._never_started(record, folder)
                return
            is_process = self._orders.image(revision.spec) is None
            key = record.function, record.revision
            joins = await self._shares.prepare(key, assignment.share, contained=not is_process)
            if is_process:
                group = self._groups.create(record.worker, self._orders.memory_bytes(revision.spec))
            config = self._orders.config(record, revision, bundle, engines, launched_at=launched_at, group=group)
            folder.create(config)
            fifo = folder.open_output()
            try:
                modules = self._preparation.modules(revision)
                order = self._orders.launch(config, folder, assignment, joins=joins, modules=modules)
                launched = await self._launcher.launch(order)
                try:
                    self._attend(record, folder, group, launched, fifo)
                except BaseException:
                    self._launcher.let_go(launched.container)
                    raise
            except BaseException:
                if record.worker not in self._workers:
                    os.close(fifo)
                raise
        except Exception as error:
            if not isinstance(error, GpufnError):
                log.exception("%s: the launch failed", record.worker)
            self._launch_failed(record, folder, group, _info(error))
            return
        self._on_started(record, assignment, launched, launched_at, self._clock.monotonic() - began)

    def _on_started(
        self, record: WorkerRecord, assignment: Assignment, launched: Launched, launched_at: float, launch_s: float
    ) -> None:
        self._preparation.note_launch((record.function, record.revision), launched_at)
        log.info(
            "%s of %s@%d is started: pid=%d standby=%s took_ms=%.1f",
            record.worker, record.function, record.revision, launched.pid, launched.is_standby, launch_s * 1000,
        )  # fmt: skip
        place_s = max(0.0, launched_at - assignment.created_at)
        cold_start = ColdStart(place_s=place_s, launch_s=launch_s, standby=launched.is_standby)
        self._reports.tell(record, WorkerEventKind.STARTED, cold_start=cold_start)
        self._reports.send_soon()
        if record.asked_to_end_at is not None or self._is_stopping:
            self._end(record, signal.SIGKILL if record.killed else signal.SIGTERM, "it was to end before it started")

    def _never_started(self, record: WorkerRecord, folder: WorkerFolder) -> None:
        """It was told to end while its bundle was on the way: no failure of anybody."""
        self._reports.tell(record, WorkerEventKind.EXITED, exit=Exit())
        record.phase = Phase.GONE
        self._burials.bury(record, folder, None)

    def _launch_failed(
        self, record: WorkerRecord, folder: WorkerFolder, group: MemoryGroup | None, error: ErrorInfo
    ) -> None:
        log.warning("%s of %s@%d cannot start: %s", record.worker, record.function, record.revision, error.message)
        self._reports.tell(record, WorkerEventKind.START_FAILED, failure=StartFailure("launch", error))
        record.phase = Phase.GONE
        self._burials.bury(record, folder, group)

    def _attend(
        self, record: WorkerRecord, folder: WorkerFolder, group: MemoryGroup | None, launched: Launched, fifo: int
    ) -> None:
        """Take charge of a process that was just started. Raises PlatformError when it is gone already."""
        process = processes.identify(launched.pid)
        if process is None or not self._watch(record, process, folder, group, fifo, container=launched.container):
            raise PlatformError("Its process ended at once.")
        record.started_at = self._clock.time()
        folder.write_process(
            ProcessFile(
                worker=record.worker,
                function=record.function,
                revision=record.revision,
                process=process,
                started_at=record.started_at,
                cgroup=os.fspath(group.path) if group else None,
                container=launched.container,
            )
        )

    def _watch(
        self,
        record: WorkerRecord,
        process: processes.Process,
        folder: WorkerFolder,
        group: MemoryGroup | None,
        fifo: int,
        *,
        container: str,
    ) -> bool:
        """Hear of its end and its output. False when it is gone already."""
        pidfd = processes.open_pidfd(process)
        if pidfd is None:
            return False
        worker = RunningWorker(
            record, process, folder, group, OutputLog(self._clock.monotonic()), fifo, pidfd, container
        )
        self._workers[record.worker] = worker
        record.process, record.phase = process, Phase.RUNNING
        if record.assignment is not None:
            key = record.function, record.revision
            self._shares.joined(record.worker, key, record.assignment.share, process.pid)
        self._loop.add_reader(fifo, self._on_output, worker)
        self._loop.add_reader(pidfd, self._on_exit, worker)
        return True

    # --- output and exits ---------------------------------------------------------------------------------------------

    def _on_output(self, worker: RunningWorker) -> None:
        """One read at a time: a worker that floods us shares the loop with the rest."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(worker.fifo, _READ_BYTES)
            self._reports.log_lines(worker.record, worker.output.feed(data, self._clock.monotonic()))

    def _on_exit(self, worker: RunningWorker) -> None:
        record = worker.record
        self._loop.remove_reader(worker.pidfd)
        os.close(worker.pidfd)
        del self._workers[record.worker]
        self._one_gone.set()
        worker.signal(signal.SIGKILL)  # the rest of its group, before its pid can be another's
        code, signum = processes.reap(worker.process.pid)
        if worker.container:
            self._endings.start(self._ask_how_it_ended(worker), f"end-{record.worker}")
        else:
            self._has_ended(worker, code, signum)

    async def _ask_how_it_ended(self, worker: RunningWorker) -> None:
        """Its parent is Docker's."""
        end = ContainerEnd()
        try:
            end = await self._launcher.end_of(worker.container)
        except PlatformError as error:
            log.warning("%s: %s", worker.record.worker, error.message)
        self._launcher.let_go(worker.container)
        self._has_ended(worker, end.code, end.signal, end.exceeded_bytes)

    def _has_ended(
        self, worker: RunningWorker, code: int | None, signum: int | None, exceeded_bytes: int | None = None
    ) -> None:
        record = worker.record
        self._shares.left(record.worker)
        self._read_rest(worker)
        # Whatever we did to it as well: the runner orders a kill when a socket closes; the kernel may have been first.
        could_be_oom = code is None and signum in (None, signal.SIGKILL)
        end = exit_of(
            worker.group if could_be_oom else None,
            code=code,
            signal=signum,
            tail=worker.output.tail(),
            device_fault=record.device_fault,
        )
        if could_be_oom and exceeded_bytes is not None:
            end = msgspec.structs.replace(end, out_of_memory=True, memory_limit_bytes=exceeded_bytes)
        if code == EXIT_START_FAILED:
            self._preparation.doubt((record.function, record.revision))
        log.info("%s of %s@%d %s", record.worker, record.function, record.revision, end.describe())
        self._reports.tell(record, WorkerEventKind.EXITED, exit=end)
        record.phase = Phase.GONE
        self._reports.send_soon()
        self._burials.bury(record, worker.folder, worker.group)

    def _read_rest(self, worker: RunningWorker) -> None:
        self._loop.remove_reader(worker.fifo)
        now = self._clock.monotonic()
        with contextlib.suppress(BlockingIOError):
            for _ in range(_LAST_READS):
                self._reports.log_lines(worker.record, worker.output.feed(os.read(worker.fifo, _READ_BYTES), now))
        self._reports.log_lines(worker.record, worker.output.flush(now))
        os.close(worker.fifo)

    def _on_buried(self, record: WorkerRecord) -> None:
        self._fleet.forget(record.worker)
        self._preparation.note_end()

    def _reap_strangers(self) -> None:
        """Templates that have ended, and what workers left to us by dying. While a launch is under way, an unknown
        child may be the worker that is about to be known."""
        if self._launches or self._shares.is_asking:
            return
        known = {worker.process.pid for worker in self._workers.values()} | self._launcher.pids | self._shares.pids
        for pid in processes.children():
            if pid not in known:
                processes.reap(pid)

    # --- start and end ------------------------------------------------------------------------------------------------

    def _take_over(self, left: list[WorkerFolder]) -> None:
        """Deal with what an earlier agent left, then with everything that is assigned."""
        assigned, self._told_early = self._told_early or {}, None
        by_name = {folder.worker: folder for folder in left}
        files = {name: folder.read_process() for name, folder in by_name.items()}
        found = [
            Found(name, file is not None and processes.is_running(file.process), by_name[name].was_begun)
            for name, file in files.items()
        ]
        for action in reconcile.at_start(found, assigned):
            folder, file = by_name[action.worker], files[action.worker]
            match action:
                case Adopt(worker) if file is not None:
                    self._adopt(folder, file, assigned.get(worker))
                case Bury(worker):
                    self._bury_left(folder, file, assigned[worker])
                case _:
                    log.info("%s: what it left is removed", action.worker)
                    self._burials.sweep(folder, file)
        self._launcher.take_over(worker.container for worker in self._workers.values() if worker.container)
        for worker, assignment in assigned.items():
            record = self._fleet.records.get(worker)
            if record is None:
                self._consider(worker, assignment)
            elif record.phase is Phase.RUNNING and assignment.desired is Desired.DRAIN:
                self._act(Drain(assignment))

    def _adopt(self, folder: WorkerFolder, file: ProcessFile, assignment: Assignment | None) -> None:
        record = WorkerRecord(file.worker, file.function, file.revision, assignment, started_at=file.started_at)
        self._fleet.records[record.worker] = record
        fifo = folder.open_output()
        if not self._watch(
            record, file.process, folder, self._burials.group_left(file.worker, file), fifo, container=file.container
        ):
            os.close(fifo)
            if assignment is not None:
                self._bury_left(folder, file, assignment)
            return
        log.info("%s of %s@%d is adopted: pid=%d", file.worker, file.function, file.revision, file.process.pid)
        if assignment is None:
            self._act(Stop(record.worker, "nobody has assigned it"))

    def _bury_left(self, folder: WorkerFolder, file: ProcessFile | None, assignment: Assignment) -> None:
        record = self._fleet.add(assignment)
        record.phase = Phase.GONE
        group = self._burials.group_left(record.worker, file)
        log.info("%s of %s@%d ended while no agent looked", record.worker, record.function, record.revision)
        self._reports.tell(record, WorkerEventKind.EXITED, exit=exit_of(group))
        processes.kill_each(processes.writing_to(folder.output))
        self._burials.bury(record, folder, group)

    async def _shut_down(self) -> None:
        self._is_stopping = True
        log.info("stopping: %d workers", len(self._workers))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._stop_grace_s):
                for worker in list(self._workers.values()):
                    self._end(worker.record, signal.SIGTERM, "the agent stops")
                await self._launches.done()  # each ends its worker as soon as it has one
                await self._all_gone()
        self._launches.cancel()
        for worker in list(self._workers.values()):
            self._end(worker.record, signal.SIGKILL, f"it did not end within {self._stop_grace_s:g} s of SIGTERM")
        try:
            async with asyncio.timeout(_BURY_TIMEOUT_S):
                await self._all_gone()
                await self._endings.done()
                await self._burials.done()
        except TimeoutError:
            log.warning("stopped with %d assignments not deleted: the next agent does it", len(self._burials))
        await self._shares.stop()

    def _let_go(self) -> None:
        for tasks in (self._launches, self._endings, self._burials):
            tasks.cancel()
        for worker in self._workers.values():
            for descriptor in (worker.pidfd, worker.fifo):
                self._loop.remove_reader(descriptor)
                os.close(descriptor)
        self._workers.clear()

    async def _all_gone(self) -> None:
        while self._workers:
            self._one_gone.clear()
            await self._one_gone.wait()

    # --- small things -------------------------------------------------------------------------------------------------

    def _process_reports(self) -> tuple[ProcessReport, ...]:
        return tuple(self._process_report(worker) for worker in self._workers.values())

    def _process_report(self, worker: RunningWorker) -> ProcessReport:
        gpus = worker.record.gpus
        if not gpus:
            return worker.report()
        pids = worker.pids
        return worker.report(self._devices.busy_by(pids, gpus), self._devices.held_by(pids, gpus))

    def _uuids(self) -> list[str]:
        return [self._devices.pool.uuid, *(device.uuid for device in self._devices.gpus)]


def _info(error: Exception) -> ErrorInfo:
    if isinstance(error, GpufnError):
        return error.info()
    return PlatformError(f"{type(error).__name__}: {error}").info()
