"""Start of workers: from an Assignment to a running process.

    1. get the Revision, its bundle, environment, engines, weights and volumes (usually prefetched), and its secrets
    2. prepare the GPU for sharing, or stop its MPS
    3. create the memory cgroup, folder, config and FIFO
    4. create the process, forked or cold; it fetches its secrets from us
    5. send STARTED

If a worker cannot start, START_FAILED is sent and the worker is cleaned up. If the node is at fault, the node's
degraded state is reported first, so that the controller has it when it handles the failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

from gpufn_core.domain.revision import Revision
from gpufn_core.domain.worker import NODE_PHASE, Assignment, ColdStart, Exit, StartFailure
from gpufn_core.errors import GpufnError, PlatformError
from gpufn_core.home import Home
from gpufn_core.protocol.launch import MountedVolume, NetworkNamespace
from gpufn_core.protocol.reports import WorkerEventKind
from gpufn_core.spec.isolation import Network
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.secrets.redaction import patterns_of
from gpufn_runtime.agent.cache.prefetch import Prefetch
from gpufn_runtime.agent.decide.fleet import WorkerRecord
from gpufn_runtime.agent.decide.template_choice import network_of
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.launchers.base import Containers, DaemonUnavailable, Launched, Launcher, LaunchOrder, NodeFault
from gpufn_runtime.agent.mps.base import GpuShares
from gpufn_runtime.agent.reports import Reports
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cgroups import MemoryGroup, MemoryGroups
from gpufn_runtime.agent.workers.cleanup import Cleanup
from gpufn_runtime.agent.workers.secret_delivery import SecretDelivery
from gpufn_runtime.agent.workers.secret_values import Secrets
from gpufn_runtime.agent.workers.supervise import Supervisor
from gpufn_runtime.agent.workers.worker_config import WorkerConfigs
from gpufn_runtime.agent.workers.worker_folder import ProcessFile, WorkerFolder

log = logging.getLogger(__name__)

_END_CHECK_S = 0.5


class _Files(NamedTuple):
    weights: tuple[str, ...]
    volumes: tuple[MountedVolume, ...]
    python: Environment | None


class WorkerLauncher(Launcher, Containers, Protocol):
    """Starts workers as processes and in containers."""


class Launches:
    """Launches in progress. A worker that must stop meanwhile gets no process, or is ended as soon as it has one."""

    def __init__(
        self,
        *,
        home: Home,
        configs: WorkerConfigs,
        prefetch: Prefetch,
        devices: DeviceWatch,
        shares: GpuShares,
        secrets: Secrets,
        groups: MemoryGroups,
        launcher: WorkerLauncher,
        egress: Callable[[], Awaitable[NetworkNamespace]],
        supervisor: Supervisor,
        cleanup: Cleanup,
        reports: Reports,
        clock: Clock,
    ) -> None:
        self._home = home
        self._configs = configs
        self._prefetch = prefetch
        self._devices = devices
        self._shares = shares
        self._secrets = secrets
        self._groups = groups
        self._launcher = launcher
        self._egress = egress
        self._supervisor = supervisor
        self._cleanup = cleanup
        self._reports = reports
        self._clock = clock
        self.tasks = Tasks()

    def start(self, record: WorkerRecord, assignment: Assignment) -> None:
        self.tasks.start(self._launch(record, assignment), f"launch-{record.worker}")

    async def _launch(self, record: WorkerRecord, assignment: Assignment) -> None:
        folder = WorkerFolder(self._home.worker(record.worker))
        launched_at, started = self._clock.time(), self._clock.monotonic()
        group: MemoryGroup | None = None
        try:
            revision = await self._prefetch.revision(record.function, record.revision)
            bundle = await self._prefetch.bundle(revision)
            engines = await self._prefetch.engines(revision, self._configs.kind(assignment))
            files = await self._files(record, revision, bundle)
            secrets = await self._secrets.values(revision.spec, revision.secret_scopes)
            fetch_s = self._clock.monotonic() - started
            if files is None or record.end_requested_at is not None:  # it had to end meanwhile: no failure
                self._reports.send_event(record, WorkerEventKind.EXITED, exit=Exit())
                self._cleanup.clean_up(record, folder, None)
                return
            is_process = self._configs.image(revision.spec) is None
            async with self._shares.joining(
                record.key, assignment.share, priority=revision.spec.priority, contained=not is_process
            ) as joining:
                if is_process:
                    group = self._groups.create(record.worker, self._configs.memory_bytes(revision.spec))
                needs_egress = is_process and network_of(revision.spec) is Network.EGRESS
                config = self._configs.config(
                    record,
                    revision,
                    bundle,
                    engines,
                    files.weights,
                    volumes=files.volumes,
                    launched_at=launched_at,
                    group=group,
                    python=files.python,
                    egress=await self._egress() if needs_egress else None,
                )
                folder.create(config)
                modules = self._prefetch.modules(revision)
                order = self._configs.launch_order(
                    config, folder, assignment, joining=joining, modules=modules, python=files.python
                )
                launched = await self._start_process(record, order, folder, group, secrets)
        except GpufnError as error:
            self._on_failed(record, folder, group, error)
        except Exception as error:
            log.exception("launch of worker %s failed", record.worker)
            fault = NodeFault.of(error) if isinstance(error, OSError) else None
            self._on_failed(record, folder, group, fault or PlatformError(f"{type(error).__name__}: {error}"))
        else:
            start = ColdStart(
                place_s=max(0.0, launched_at - assignment.created_at),
                fetch_s=fetch_s,
                launch_s=self._clock.monotonic() - started - fetch_s,
                standby=launched.is_standby,
            )
            self._prefetch.note_launch(record.key, launched_at)
            self._on_started(record, launched, start)

    async def _files(self, record: WorkerRecord, revision: Revision, bundle: str) -> _Files | None:
        """Return the weights, volumes and environment; None if the worker has to end first. A fetch takes minutes, and
        continues then for the next worker."""
        spec = revision.spec
        if not spec.weights and not spec.mounts and self._configs.environment(spec) is None:
            return _Files((), (), None)
        task = asyncio.create_task(self._fetch(record.worker, revision, bundle), name=f"files-{record.worker}")
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_END_CHECK_S)
                if record.end_requested_at is not None:
                    return None
            return task.result()
        finally:
            task.cancel()

    async def _fetch(self, worker: str, revision: Revision, bundle: str) -> _Files:
        return _Files(
            await self._prefetch.weights(revision),
            await self._prefetch.volumes(revision, worker),
            await self._prefetch.environment(revision, bundle),
        )

    async def _start_process(
        self,
        record: WorkerRecord,
        order: LaunchOrder,
        folder: WorkerFolder,
        group: MemoryGroup | None,
        secrets: Mapping[str, str],
    ) -> Launched:
        """Start the process, its supervision and the delivery of its secrets. Raises OSError, PlatformError; also if
        the process ended at once."""
        with contextlib.ExitStack() as cleanup:
            fifo = folder.open_output()
            cleanup.callback(os.close, fifo)
            delivery = SecretDelivery(folder.secrets, secrets) if secrets else None
            if delivery is not None:
                cleanup.callback(delivery.close)
            launched = await self._launcher.launch(order)
            if launched.container:
                cleanup.callback(self._launcher.release, launched.container)
            else:  # kill at once: the cleanup may have to wait, and the worker would take calls; not reaped, so safe
                cleanup.callback(processes.kill_each, [launched.pid])
            handle = launched.handle or processes.open_handle(launched.pid)
            if handle is None:
                raise PlatformError("The worker's process ended at once.")
            cleanup.callback(os.close, handle.pidfd)
            patterns = patterns_of(secrets.values())
            self._supervisor.supervise(
                record, handle, folder, group, fifo, container=launched.container, secret_patterns=patterns
            )
            cleanup.pop_all()
            if delivery is not None:
                self.tasks.start(delivery.deliver(launched.pid), f"secrets-{record.worker}")
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

    def _on_started(self, record: WorkerRecord, launched: Launched, start: ColdStart) -> None:
        took_ms = (start.fetch_s + start.launch_s) * 1000
        log.info("%s started: pid=%d standby=%s took_ms=%.1f", record, launched.pid, start.standby, took_ms)
        refused = launched.refused_modules
        self._reports.send_event(record, WorkerEventKind.STARTED, cold_start=start, refused_modules=refused)
        self._reports.send_soon()
        if record.end_requested_at is not None:
            signum = signal.SIGKILL if record.killed else signal.SIGTERM
            self._supervisor.end(record, signum, "it had to end before it started")

    def _on_failed(
        self, record: WorkerRecord, folder: WorkerFolder, group: MemoryGroup | None, error: GpufnError
    ) -> None:
        log.warning("%s failed to start: %s", record, error.message)
        phase = "launch"
        if isinstance(error, NodeFault):
            phase = NODE_PHASE
            if not isinstance(error, DaemonUnavailable):  # in that case only containers must go elsewhere
                self._devices.pause_placements(error.message.rstrip("."))
            self._reports.send()  # before the failed launch, so that the retry goes to another node
        self._reports.send_event(record, WorkerEventKind.START_FAILED, failure=StartFailure(phase, error.info()))
        self._cleanup.clean_up(record, folder, group)
