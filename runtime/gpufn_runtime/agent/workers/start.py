"""From an Assignment to a process that runs.

    1. its Revision (watched), bundle and engines (brought here at deploy); its GPU made ready to be shared, or left by
    MPS; 2. memory group, folder, config, FIFO; 3. a process, forked or cold; 4. `started` goes out

A worker that cannot be started says `start_failed`, and is buried. When its node is to blame, that takes no more for a
while: who hears of the failure has heard of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from typing import Protocol

from gpufn_core.domain.worker import OF_THE_NODE, Assignment, ColdStart, Exit, StartFailure
from gpufn_core.errors import ErrorInfo, GpufnError, PlatformError
from gpufn_core.home import Home
from gpufn_core.protocol.reports import WorkerEventKind
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_runtime.agent.cache.prefetch import Preparation
from gpufn_runtime.agent.decide.fleet import WorkerRecord
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.launchers.base import Containers, DaemonAway, Launched, Launcher, LaunchOrder, NodeFault
from gpufn_runtime.agent.mps.base import GpuShares
from gpufn_runtime.agent.reports import Reports
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cgroups import MemoryGroup, MemoryGroups
from gpufn_runtime.agent.workers.cleanup import Burials
from gpufn_runtime.agent.workers.supervise import Running
from gpufn_runtime.agent.workers.worker_config import Orders
from gpufn_runtime.agent.workers.worker_folder import ProcessFile, WorkerFolder

log = logging.getLogger(__name__)


class WorkerLauncher(Launcher, Containers, Protocol):
    """Starts workers as processes and in containers."""


class Launches:
    """Those under way. A worker that is told to end meanwhile gets no process, or ends as soon as it has one."""

    def __init__(
        self,
        *,
        home: Home,
        orders: Orders,
        preparation: Preparation,
        devices: DeviceWatch,
        shares: GpuShares,
        groups: MemoryGroups,
        launcher: WorkerLauncher,
        running: Running,
        burials: Burials,
        reports: Reports,
        clock: Clock,
    ) -> None:
        self._home = home
        self._orders = orders
        self._preparation = preparation
        self._devices = devices
        self._shares = shares
        self._groups = groups
        self._launcher = launcher
        self._running = running
        self._burials = burials
        self._reports = reports
        self._clock = clock
        self._tasks = Tasks()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, record: WorkerRecord, assignment: Assignment) -> None:
        self._tasks.start(self._launch(record, assignment), f"launch-{record.worker}")

    async def done(self) -> None:
        await self._tasks.done()

    def cancel(self) -> None:
        self._tasks.cancel()

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
            async with self._shares.joining(record.key, assignment.share, contained=not is_process) as joins:
                if is_process:
                    group = self._groups.create(record.worker, self._orders.memory_bytes(revision.spec))
                config = self._orders.config(record, revision, bundle, engines, launched_at=launched_at, group=group)
                folder.create(config)
                modules = self._preparation.modules(revision)
                order = self._orders.launch(config, folder, assignment, joins=joins, modules=modules)
                launched = await self._begin(record, order, folder, group)
        except Exception as error:
            if not isinstance(error, GpufnError):
                log.exception("%s: the launch failed", record.worker)
            self._failed(record, folder, group, NodeFault.of(error) if isinstance(error, OSError) else error)
            return
        self._started(record, assignment, launched, launched_at, self._clock.monotonic() - began)

    async def _begin(
        self, record: WorkerRecord, order: LaunchOrder, folder: WorkerFolder, group: MemoryGroup | None
    ) -> Launched:
        """Start its process and have it looked after. Raises OSError, PlatformError, also when it is gone already."""
        with contextlib.ExitStack() as undo:
            fifo = folder.open_output()
            undo.callback(os.close, fifo)
            launched = await self._launcher.launch(order)
            if launched.container:
                undo.callback(self._launcher.let_go, launched.container)
            else:  # now: a burial may have to wait, and it would take calls. It is our child, and not reaped yet
                undo.callback(processes.kill_each, [launched.pid])
            handle = launched.handle or processes.open_handle(launched.pid)
            if handle is None:
                raise PlatformError("Its process ended at once.")
            undo.callback(os.close, handle.pidfd)
            self._running.attend(record, handle, folder, group, fifo, container=launched.container)
            undo.pop_all()
        record.started_at = self._clock.time()
        folder.write_process(
            ProcessFile(
                worker=record.worker,
                function=record.function,
                revision=record.revision,
                process=handle.process,
                started_at=record.started_at,
                cgroup=os.fspath(group.path) if group else None,
                container=launched.container,
            )
        )
        return launched

    def _started(
        self, record: WorkerRecord, assignment: Assignment, launched: Launched, launched_at: float, launch_s: float
    ) -> None:
        self._preparation.note_launch(record.key, launched_at)
        log.info(
            "%s is started: pid=%d standby=%s took_ms=%.1f",
            record, launched.pid, launched.is_standby, launch_s * 1000,
        )  # fmt: skip
        place_s = max(0.0, launched_at - assignment.created_at)
        cold_start = ColdStart(place_s=place_s, launch_s=launch_s, standby=launched.is_standby)
        self._reports.tell(record, WorkerEventKind.STARTED, cold_start=cold_start)
        self._reports.send_soon()
        if record.asked_to_end_at is not None:
            how = signal.SIGKILL if record.killed else signal.SIGTERM
            self._running.end(record, how, "it was to end before it started")

    def _never_started(self, record: WorkerRecord, folder: WorkerFolder) -> None:
        """It was told to end while its bundle was on the way: no failure of anybody."""
        self._reports.tell(record, WorkerEventKind.EXITED, exit=Exit())
        self._burials.bury(record, folder, None)

    def _failed(self, record: WorkerRecord, folder: WorkerFolder, group: MemoryGroup | None, error: Exception) -> None:
        info, phase = _info(error), "launch"
        log.warning("%s cannot start: %s", record, info.message)
        if isinstance(error, NodeFault):
            phase = OF_THE_NODE
            self._rest_for(error)
        self._reports.tell(record, WorkerEventKind.START_FAILED, failure=StartFailure(phase, info))
        self._burials.bury(record, folder, group)

    def _rest_for(self, fault: NodeFault) -> None:
        """It is reported before the launch is that failed for it: whoever starts the worker again does so elsewhere."""
        if not isinstance(fault, DaemonAway):  # for that, containers alone go elsewhere
            self._devices.rest(fault.message.rstrip("."))
        self._reports.send()


def _info(error: Exception) -> ErrorInfo:
    if isinstance(error, GpufnError):
        return error.info()
    return PlatformError(f"{type(error).__name__}: {error}").info()
