"""Node agent: makes this node's workers match its Assignments. Only this module applies the decisions of others.

When an Assignment or a report changes, and each second:
    `reconcile` returns an action; `start` starts a worker, `supervise` ends it, `cleanup` removes its files and
    processes.
Each second:
    NodeReport; clock skew (each minute); overdue workers; retries of unsent events and failed removals; orphans.
At the start:
    1. read the folders of an earlier agent; 2. wait until the watches have delivered all Assignments; 3. adopt running
    workers and clean up after dead ones; 4. from then on, apply changes as they arrive.
At the end, in this order:
    1. launch nothing more; 2. SIGTERM to all workers, SIGKILL after the grace period; 3. delete their Assignments;
    4. stop MPS daemons; 5. kill templates; 6. stop watches and subscriptions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from gpufn_core.domain.devices.device import Health
from gpufn_core.domain.worker import Assignment, Desired, WorkerState
from gpufn_core.home import Home
from gpufn_core.protocol import subjects
from gpufn_core.protocol.messages import KillOrder
from gpufn_core.protocol.reports import RunnerReport
from gpufn_platform.bus.connection import Bus, Message, Subscription
from gpufn_platform.bus.storage.key_value import Entry, Watch
from gpufn_platform.process import grace_period
from gpufn_platform.process.clock import Clock
from gpufn_platform.secrets.redaction import Patterns
from gpufn_platform.signing.signatures import Signatures
from gpufn_runtime.agent.bytecode.background import BackgroundCompiler
from gpufn_runtime.agent.cache.caches import Caches
from gpufn_runtime.agent.cache.prefetch import Prefetch, Preparer
from gpufn_runtime.agent.clock_check import ClockCheck
from gpufn_runtime.agent.decide import reconcile
from gpufn_runtime.agent.decide.fleet import Fleet, Phase
from gpufn_runtime.agent.decide.reconcile import DeleteAssignment, Drain, Kill, Launch, Refuse, Stop
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.egress.namespace import EgressNamespace
from gpufn_runtime.agent.isolation.sandboxes import Sandboxes
from gpufn_runtime.agent.mps.base import GpuShares
from gpufn_runtime.agent.options import AgentBuckets, AgentOptions
from gpufn_runtime.agent.reports import Readiness, Reports, image_log
from gpufn_runtime.agent.workers import processes, worker_folder
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from gpufn_runtime.agent.workers.cleanup import Cleanup
from gpufn_runtime.agent.workers.parking import Parking
from gpufn_runtime.agent.workers.profiler import Profiler
from gpufn_runtime.agent.workers.running_workers import RunningWorkers
from gpufn_runtime.agent.workers.secret_values import Secrets
from gpufn_runtime.agent.workers.start import Launches, WorkerLauncher
from gpufn_runtime.agent.workers.supervise import Supervisor
from gpufn_runtime.agent.workers.takeover import Takeover, secret_patterns_of
from gpufn_runtime.agent.workers.worker_config import WorkerConfigs
from gpufn_runtime.agent.workers.worker_folder import WorkerFolder

log = logging.getLogger(__name__)

_CLEANUP_TIMEOUT_S = 5.0
_PARKED_DIVISOR = 4  # default: a quarter of the host's memory is for parked workers

_assignment = msgspec.msgpack.Decoder(Assignment)
_kill_order = msgspec.msgpack.Decoder(KillOrder)
_runner_report = msgspec.msgpack.Decoder(RunnerReport)


class AgentLauncher(WorkerLauncher, Preparer, Readiness, Protocol):
    """Starts workers, and prepares templates and containers for the revisions in use."""

    @property
    def pids(self) -> frozenset[int]: ...

    @property
    def has_child_processes(self) -> bool: ...

    def take_over(self, containers: Iterable[str]) -> None: ...
    def set_standby_memory(self, limit_bytes: int) -> None: ...


_DEFAULT_OPTIONS = AgentOptions()


class Agent:
    def __init__(
        self,
        *,
        node: str,
        home: Home,
        bus: Bus,
        buckets: AgentBuckets,
        caches: Caches,
        bytecode: BackgroundCompiler | None = None,
        secrets: Secrets,
        signatures: Signatures,
        launcher: AgentLauncher,
        groups: MemoryGroups,
        devices: DeviceWatch,
        shares: GpuShares,
        egress: EgressNamespace,
        sandboxes: Sandboxes | None = None,
        clock: Clock,
        prove_cuda: Callable[[Iterable[str]], None] = lambda gpus: None,
        options: AgentOptions = _DEFAULT_OPTIONS,
    ) -> None:
        self._node = node
        self._home = home
        self._bus = bus
        self._assignments = buckets.assignments
        self._caches = caches
        self._bytecode = bytecode
        self._secrets = secrets
        self._signatures = signatures
        self._launcher = launcher
        self._clock = clock
        self._options = options
        self._devices = devices
        self._shares = shares
        self._egress = egress
        self._prove_cuda = prove_cuda
        self._fleet = Fleet()
        self._running_workers: RunningWorkers = {}
        self._profiler = Profiler(bus, node, self._running_workers)
        self._clock_check = ClockCheck(bus, buckets.assignments.stream, node=node, clock=clock)
        park_bytes = options.park_bytes
        if park_bytes is None:
            park_bytes = devices.pool.memory_bytes // _PARKED_DIVISOR
        self._reports = Reports(
            bus,
            node=node,
            devices=devices,
            running_workers=self._running_workers,
            readiness=launcher,
            clock=clock,
            clock_check=self._clock_check,
            weights=caches.weights.report,
            environments=caches.environments,
            contains_all=options.default_image is not None,
            isolation_trouble=options.isolation_trouble,
            address=options.address,
            park_bytes=park_bytes,
        )
        configs = WorkerConfigs(
            home,
            devices,
            options.default_image,
            options.open_files,
            options.supervisor_fifo,
            sandboxes=sandboxes,
        )
        self._prefetch = Prefetch(
            functions=buckets.functions,
            revisions=buckets.revisions,
            bundles=caches.bundles,
            engines=caches.engines,
            weights=caches.weights,
            volumes=caches.volumes,
            environments=caches.environments,
            signatures=signatures,
            gpus=devices.gpus,
            launcher=launcher,
            running=self._fleet.revisions,
            workers=self._fleet.workers,
            image_of=configs.image,
            limits_of=configs.limits,
            environment_of=configs.environment,
            log_line=image_log(bus, clock, node),
            compile_later=None if bytecode is None else bytecode.request,
            teams=buckets.teams,
        )
        self._cleanup = Cleanup(
            self._fleet,
            node=node,
            assignments=buckets.assignments,
            groups=groups,
            on_done=self._prefetch.note_end,
            retry_s=options.tick_s,
        )
        self._supervisor = Supervisor(
            self._running_workers,
            containers=launcher,
            shares=shares,
            cleanup=self._cleanup,
            reports=self._reports,
            recheck=self._prefetch.recheck,
            prove_cuda=prove_cuda,
            clock=clock,
        )
        self._launches = Launches(
            home=home,
            configs=configs,
            prefetch=self._prefetch,
            devices=devices,
            shares=shares,
            secrets=secrets,
            groups=groups,
            launcher=launcher,
            egress=egress.ready,
            supervisor=self._supervisor,
            cleanup=self._cleanup,
            reports=self._reports,
            clock=clock,
        )
        self._takeover = Takeover(self._fleet, self._supervisor, self._cleanup, self._reports)
        self._parking = Parking(devices, self._running_workers, self._supervisor, self._reports)
        self._early_assignments: dict[str, Assignment] | None = {}  # received before the takeover; None afterwards
        self._is_stopping = False
        self._calls_in_progress: dict[str, int] = {}  # slots that queued calls occupy, by worker

    async def run(self, stop: asyncio.Event, force_stop: asyncio.Event | None = None) -> None:
        """Work until `stop` is set, then end all workers: when their calls have finished, when the grace period is
        over, or when `force_stop` is set."""
        processes.become_subreaper()
        grace_period.clear_running_calls(self._home)
        self._caches.sweep()
        watches = await self._watch_and_take_over()
        subscriptions = self._subscribe()
        self._devices.start(self._reports.send_metrics, self._parking.verify, self._owns)
        tasks = self._background_tasks()
        devices = ",".join(device.uuid for device in (self._devices.pool, *self._devices.gpus))
        log.info("node %s is ready: devices=%s", self._node, devices)
        try:
            await self._step_until(stop)
            await self._shut_down(force_stop or asyncio.Event())
        finally:
            # After an error the workers live on, and the next agent adopts them.
            for task in tasks:
                task.cancel()
            self._devices.stop()
            self._clock_check.cancel()
            self._profiler.stop()
            self._launches.tasks.cancel()
            self._cleanup.tasks.cancel()
            self._supervisor.release()
            self._signatures.stop()
            for watch in watches:
                watch.stop()
            for subscription in subscriptions:
                subscription.unsubscribe()

    async def _watch_and_take_over(self) -> list[Watch]:
        """Start the watches. Take over the workers of an earlier agent once all Assignments are known."""
        folders = worker_folder.all_folders(self._home)
        await self._signatures.start()
        watches = [
            *await self._prefetch.watch(),
            await self._assignments.watch(self._on_assignment, prefix=f"{self._node}."),
        ]
        await self._shares.take_over()
        self._take_over(folders, await secret_patterns_of(folders, self._secrets))
        if self._caches.volumes is not None:
            self._caches.volumes.inherit(self._fleet.records)
        in_use = {uuid for record in self._fleet.records.values() for uuid in record.gpus}
        self._prove_cuda(gpu.uuid for gpu in self._devices.gpus if gpu.uuid not in in_use)
        return watches

    def _subscribe(self) -> list[Subscription]:
        return [
            self._bus.subscribe(subjects.kill(self._node), self._on_kill_order),
            self._profiler.start(),
            self._bus.subscribe(subjects.runner_report(self._node), self._on_runner_report),
        ]

    def _background_tasks(self) -> list[asyncio.Task[None]]:
        tasks = [
            asyncio.create_task(self._prefetch.run(), name="prepare"),
            asyncio.create_task(self._shares.run(self._end_because_of_gpu), name="shares"),
        ]
        if self._bytecode is not None:
            tasks.append(asyncio.create_task(self._bytecode.run(), name="bytecode"))
        return tasks

    async def _step_until(self, stop: asyncio.Event) -> None:
        """Take a step each tick. A failed step is logged, and the next one tries again."""
        tick_s = self._options.tick_s
        while not stop.is_set():
            try:
                self.step(self._clock.monotonic())
            except Exception:
                log.exception("a step failed; next step in %g s", tick_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tick_s):
                    await stop.wait()

    def _owns(self, pid: int) -> bool:
        """Return whether a process is the platform's: an MPS daemon or a worker, or a child of one or of the agent."""
        workers = (worker.process.pid for worker in self._running_workers.values())
        return processes.descends_from(pid, {os.getpid(), *self._shares.pids, *workers})

    def step(self, now: float) -> None:
        """Do the work of one tick."""
        self._clock_check.step(now)
        self._reports.send()
        self._end_workers_of_failed_devices(now)
        self._update_standby_memory()
        for record in list(self._fleet.records.values()):
            self._act(reconcile.when_overdue(record, now, self._options.kill_after_s))
        self._supervisor.step(now)
        self._reports.send_unsent()
        self._cleanup.step()
        self._reap_unknown_children()

    def _update_standby_memory(self) -> None:
        """Give standby containers the memory that no worker leases."""
        shares = [record.assignment.share for record in self._fleet.records.values() if record.assignment is not None]
        self._launcher.set_standby_memory(self._devices.pool.memory_bytes - sum(share.memory_bytes for share in shares))

    def _end_workers_of_failed_devices(self, now: float) -> None:
        for device in self._devices.devices(now):
            if device.health is Health.FAILED:
                for record in list(self._fleet.records.values()):
                    if device.uuid in record.gpus:
                        self._end_because_of_gpu(record.worker, f"{device.uuid}: {device.health_reason}")

    def _end_because_of_gpu(self, worker: str, reason: str) -> None:
        record = self._fleet.records.get(worker)
        if record is not None and not record.killed:
            record.device_fault = reason
            self._act(Kill(worker, reason))

    # --- messages from the bus ----------------------------------------------------------------------------------------

    def _on_assignment(self, key: str, entry: Entry | None) -> None:
        worker = key.rpartition(".")[2]
        assignment = _assignment.decode(entry.value) if entry else None
        if self._early_assignments is not None:
            if assignment is None:
                self._early_assignments.pop(worker, None)
            else:
                self._early_assignments[worker] = assignment
            return
        if not self._is_stopping:
            self._reconcile(worker, assignment)

    def _reconcile(self, worker: str, assignment: Assignment | None) -> None:
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
        self._calls_in_progress = {worker.worker: max(0, worker.in_use - worker.left_over) for worker in report.workers}
        for worker in report.workers:
            if (record := self._fleet.records.get(worker.worker)) is not None:
                if worker.state is WorkerState.READY:
                    record.was_ready = True
                    self._shares.worker_ready(worker.worker)
                self._parking.note(record, worker)
                if worker.state.live:
                    record.reported_ended_at = None
                elif record.reported_ended_at is None:
                    record.reported_ended_at = self._clock.monotonic()
            self._prefetch.learn_modules((worker.function, worker.revision), worker.modules)

    def _act(self, action: reconcile.Action | None) -> None:
        match action:
            case Launch(assignment):
                record = self._fleet.add(assignment)
                self._update_standby_memory()
                self._launches.start(record, assignment)
            case Drain(assignment):
                record = self._fleet.records[assignment.worker]
                if record.drain_by is None:
                    timeout_s = self._prefetch.timeout_s(record.key)
                    record.drain_by = self._clock.monotonic() + timeout_s + self._options.drain_grace_s
            case Stop(worker, reason):
                self._supervisor.end(self._fleet.records[worker], signal.SIGTERM, reason)
            case Kill(worker, reason):
                self._supervisor.end(self._fleet.records[worker], signal.SIGKILL, reason)
            case DeleteAssignment(assignment, reason):
                log.info("assignment of worker %s is deleted: %s", assignment.worker, reason)
                self._cleanup.delete(assignment.worker)
            case Refuse(assignment, newest):
                log.warning(
                    "assignment of worker %s is refused: epoch %d < %d", assignment.worker, assignment.epoch, newest
                )
                if assignment.worker not in self._fleet.records:
                    self._cleanup.delete(assignment.worker)
            case None:
                pass

    def _reap_unknown_children(self) -> None:
        """Reap templates that have ended, and orphans of workers. During a launch nothing is reaped: an unknown child
        may be the new worker."""
        parts = (self._shares, self._egress, self._launcher, self._caches.environments, self._bytecode, self._profiler)
        if self._launches.tasks or any(part is not None and part.has_child_processes for part in parts):
            return
        workers = {worker.process.pid for worker in self._running_workers.values()}
        for pid in set(processes.children()) - workers - self._launcher.pids - self._shares.pids:
            processes.reap(pid)

    # --- start and end ------------------------------------------------------------------------------------------------

    def _take_over(self, folders: list[WorkerFolder], secret_patterns: Mapping[str, Patterns]) -> None:
        """Take over the workers of an earlier agent, then apply all Assignments."""
        assigned, self._early_assignments = self._early_assignments or {}, None
        self._takeover.take_over(folders, assigned, secret_patterns)
        self._launcher.take_over(worker.container for worker in self._running_workers.values() if worker.container)
        for worker, assignment in assigned.items():
            record = self._fleet.records.get(worker)
            if record is None:
                self._reconcile(worker, assignment)
            elif record.phase is Phase.RUNNING and assignment.desired is Desired.DRAIN:
                self._act(Drain(assignment))

    async def _shut_down(self, force_stop: asyncio.Event) -> None:
        self._is_stopping = True
        grace_period.set_running_calls(self._home, self._calls_running())
        grace_s = grace_period.grace_s(self._home, self._options.grace_s)
        log.info("stopping: %d workers have %g s to finish their calls", len(self._running_workers), grace_s)
        self._devices.pause_placements("its node stops")
        self._reports.send()  # from now on the controller places no workers here
        for record in self._fleet.records.values():
            if record.phase is not Phase.ENDED:
                record.stopping = True
                self._supervisor.end(record, signal.SIGTERM, "the agent stops")
        await self._wait_for_calls(grace_s, force_stop)
        self._launches.tasks.cancel()
        reason = f"its node stops, and its calls did not finish within {grace_s:g} s"
        for worker in self._running_workers.values():
            self._supervisor.end(worker.record, signal.SIGKILL, reason)
        try:
            async with asyncio.timeout(_CLEANUP_TIMEOUT_S):
                await self._supervisor.all_ended()
                await self._supervisor.ending_tasks.done()
                await self._cleanup.tasks.done()
        except TimeoutError:
            log.warning("stopped before %d cleanups were done: the next agent finishes them", len(self._cleanup.tasks))
        await self._shares.stop()
        grace_period.clear_running_calls(self._home)

    async def _wait_for_calls(self, grace_s: float, force_stop: asyncio.Event) -> None:
        """Wait until all workers have ended or the grace period is over. The node must report meanwhile: otherwise it
        would be considered dead, and its calls would start elsewhere while they still run here."""
        deadline = self._clock.monotonic() + grace_s
        waiters = [asyncio.create_task(awaitable) for awaitable in (self._all_ended(), force_stop.wait())]
        try:
            while (remaining_s := deadline - self._clock.monotonic()) > 0:
                grace_period.set_running_calls(self._home, self._calls_running())
                finished, _ = await asyncio.wait(
                    waiters, timeout=min(remaining_s, self._options.tick_s), return_when=asyncio.FIRST_COMPLETED
                )
                if finished:
                    return
                self._devices.pause_placements("its node stops")
                self._supervisor.step(self._clock.monotonic())
                self._reports.send()
                self._reports.send_unsent()
        finally:
            for task in waiters:
                task.cancel()

    async def _all_ended(self) -> None:
        await self._launches.tasks.done()
        await self._supervisor.all_ended()

    def _calls_running(self) -> int:
        """Number of running calls on this node, as last reported by its runner."""
        return sum(self._calls_in_progress.get(worker, 0) for worker in self._running_workers)
