"""GPU sharing by MPS v2: one control daemon per shared GPU. All daemons are checked every few seconds.

a worker joins          the GPU's daemon is started if needed; the worker gets a client's environment
a worker is READY       it must be a client of the daemon; otherwise it runs without limits, and is ended
the last worker left    the daemon stops after a while, or when a worker needs the GPU in another mode
an incident             (one failed check is none: on a busy machine a daemon may answer too late)
                        1. the GPU gets no new workers; 2. the agent evicts and ends the tenants; 3. when they have
                        left, or after a timeout, the daemon is restarted unless its server is ACTIVE again; after a
                        FAULT the tenants are suspects
the agent starts        running daemons of an earlier agent are taken over; for dead ones, the GPU is restored
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from gpufn_core.domain.devices.device import DeviceShare, Health, Share
from gpufn_core.domain.revision import RevisionKey
from gpufn_core.errors import DeviceFailed, FunctionStartFailed
from gpufn_core.spec.priority import Priority
from gpufn_platform.process.clock import Clock
from gpufn_runtime.agent.devices.base import HealthCondition
from gpufn_runtime.agent.mps.base import EndWorker, Joining
from gpufn_runtime.agent.mps.client import PIPE_IN_CONTAINER, client_environment
from gpufn_runtime.agent.mps.condition import Condition
from gpufn_runtime.agent.mps.control import Control, ControlFailed
from gpufn_runtime.agent.mps.daemon import Daemon
from gpufn_runtime.agent.mps.daemon_factory import DaemonFactory
from gpufn_runtime.agent.mps.fault_attribution import INCIDENTS, Suspects
from gpufn_runtime.agent.workers import processes

log = logging.getLogger(__name__)

_CHECK_EVERY_S = 5.0
_LINGER_S = 30.0  # a daemon's start takes about 1 s, which a function that scales to zero and back should not pay often
_LEAVE_TIMEOUT_S = 10.0
_EVICT_TIMEOUT_S = 3.0
_CHECKS_UNTIL_NO_CLIENT = 2
_CHECKS_UNTIL_HUNG = 2


@dataclass
class _Tenant:
    key: RevisionKey
    pid: int  # of the worker's process; in a container, of the first process, whose child the worker is
    is_ready: bool = False
    missed_checks: int = 0  # consecutive checks in which the worker was READY but not a client


@dataclass
class _Gpu:
    daemon: Daemon
    tenants: dict[str, _Tenant] = field(default_factory=dict)  # by worker
    trouble: HealthCondition | None = None
    empty_since: float = 0.0
    failed_checks: int = 0  # consecutive checks that the daemon did not answer
    joining: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    emptied: asyncio.Event = field(default_factory=asyncio.Event)


class MpsDaemons:
    def __init__(
        self,
        daemon_factory: DaemonFactory,
        clock: Clock,
        *,
        check_every_s: float = _CHECK_EVERY_S,
        linger_s: float = _LINGER_S,
        leave_s: float = _LEAVE_TIMEOUT_S,
        evict_s: float = _EVICT_TIMEOUT_S,
        checks_clients: bool = True,
    ) -> None:
        """`checks_clients` is False if the agent has its own pids: no worker would be in a daemon's list of clients,
        and each would be ended."""
        self._daemon_factory = daemon_factory
        self._clock = clock
        self._check_every_s = check_every_s
        self._linger_s = linger_s
        self._leave_s = leave_s
        self._evict_s = evict_s
        self._checks_clients = checks_clients
        self._gpus: dict[str, _Gpu] = {}
        self._gpu_of: dict[str, str] = {}  # by worker
        self.suspects = Suspects()

    @property
    def has_child_processes(self) -> bool:
        return Control.running > 0

    @property
    def pids(self) -> frozenset[int]:
        known = (gpu.daemon.process for gpu in self._gpus.values())
        return frozenset(process.pid for process in known if process is not None)

    @contextlib.asynccontextmanager
    async def joining(
        self, key: RevisionKey, share: DeviceShare, *, priority: Priority, contained: bool
    ) -> AsyncGenerator[Joining, None]:
        if share.mode is not Share.MPS:
            for uuid in share.gpus:
                await self._vacate(uuid)
            yield Joining()
            return
        if key in self.suspects.quarantined:
            raise FunctionStartFailed(
                f"{key[0]}@{key[1]} no longer starts on shared GPUs of this node: it was running at {INCIDENTS} GPU "
                f"failures in a row. Fix the function and deploy it again, or deploy it with share='exclusive'."
            )
        (uuid,) = share.gpus
        gpu = self._gpu(uuid)
        gpu.joining += 1
        try:
            async with gpu.lock:
                await self._match_containers(gpu, contained)
                if not gpu.daemon.is_running():
                    await self._start(gpu, gpu.daemon.start)
                if gpu.trouble is not None:
                    raise DeviceFailed(f"{uuid}: {gpu.trouble.reason}")
            mounts = gpu.daemon.mounts
            pipe = gpu.daemon.pipe if mounts is None else PIPE_IN_CONTAINER
            yield Joining(client_environment(share, pipe, priority), mounts)
        finally:
            gpu.joining -= 1
            gpu.empty_since = self._clock.monotonic()

    def worker_joined(self, worker: str, key: RevisionKey, share: DeviceShare, pid: int) -> None:
        if share.mode is Share.MPS:
            (uuid,) = share.gpus
            self._gpu_of[worker] = uuid
            self._gpu(uuid).tenants[worker] = _Tenant(key, pid)

    def worker_ready(self, worker: str) -> None:
        if (uuid := self._gpu_of.get(worker)) is not None:
            self._gpus[uuid].tenants[worker].is_ready = True

    async def evict(self, worker: str, pids: Iterable[int]) -> None:
        if (uuid := self._gpu_of.get(worker)) is None:
            return
        try:
            async with asyncio.timeout(self._evict_s):
                await self._gpus[uuid].daemon.terminate(pids)
        except (ControlFailed, TimeoutError) as error:
            log.info("GPU %s: worker %s is ended without MPS eviction: %s", uuid, worker, error)

    def worker_ended(self, worker: str) -> None:
        if (uuid := self._gpu_of.pop(worker, None)) is None:
            return
        gpu = self._gpus[uuid]
        del gpu.tenants[worker]
        if not gpu.tenants:
            gpu.empty_since = self._clock.monotonic()
            gpu.emptied.set()

    def trouble(self, gpu: str) -> HealthCondition | None:
        return self._gpus[gpu].trouble if gpu in self._gpus else None

    async def run(self, end: EndWorker) -> None:
        while True:
            for uuid in list(self._gpus):
                try:
                    await self.check(uuid, end)
                except Exception:
                    log.exception("GPU %s: check of its MPS daemon failed", uuid)
            await asyncio.sleep(self._check_every_s)

    async def stop(self) -> None:
        known, self._gpus = self._gpus, {}
        self._gpu_of.clear()
        for gpu in known.values():
            async with gpu.lock:
                await gpu.daemon.stop()

    async def take_over(self) -> None:
        """Take over an earlier agent's daemons, before any worker is adopted."""
        for daemon in self._daemon_factory.existing():
            if daemon.is_running():
                log.info("GPU %s: took over its MPS daemon", daemon.gpu)
                self._gpus[daemon.gpu] = _Gpu(daemon, empty_since=self._clock.monotonic())
            else:
                await daemon.stop()

    async def check(self, uuid: str, end: EndWorker) -> None:
        """Do the regular check of one GPU."""
        if (gpu := self._gpus.get(uuid)) is None:
            return
        async with gpu.lock:
            if self._gpus.get(uuid) is not gpu:
                return  # it was stopped while we waited for the lock
            empty_s = self._clock.monotonic() - gpu.empty_since
            if not gpu.tenants and not gpu.joining and empty_s >= self._linger_s:
                await self._stop(gpu)
                return
            gpu.daemon.keep_logs_small()
            condition = await gpu.daemon.observe()
            gpu.failed_checks = gpu.failed_checks + 1 if condition is Condition.HUNG else 0
            if condition is Condition.HUNG and gpu.failed_checks < _CHECKS_UNTIL_HUNG:
                log.info("GPU %s: %s; it is checked again", uuid, condition.value)
            elif condition.is_incident:
                await self._on_incident(gpu, condition, end)
            elif condition is Condition.ACTIVE:
                gpu.trouble = None
                await self._end_non_clients(gpu, end)

    async def _on_incident(self, gpu: _Gpu, condition: Condition, end: EndWorker) -> None:
        uuid = gpu.daemon.gpu
        gpu.trouble = HealthCondition(Health.DEGRADED, condition.value)
        revisions = sorted({tenant.key for tenant in gpu.tenants.values()})
        tenants = ",".join(f"{name}@{number}" for name, number in revisions)
        log.warning("GPU %s: %s; tenants=%s", uuid, condition.value, tenants)
        if condition is Condition.FAULT:
            quarantined_before = set(self.suspects.quarantined)
            self.suspects.record(uuid, revisions, self._clock.monotonic())
            for name, number in sorted(self.suspects.quarantined - quarantined_before):
                log.warning("%s@%d is quarantined: it was running at %d GPU failures in a row", name, number, INCIDENTS)
        gpu.emptied.clear()
        for worker in list(gpu.tenants):
            end(worker, f"{uuid}: {condition.value}")
        if gpu.tenants:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._leave_s):
                    await gpu.emptied.wait()
        if await gpu.daemon.observe() is Condition.ACTIVE:
            gpu.trouble = None
            return
        try:
            await self._start(gpu, gpu.daemon.restart)
        except DeviceFailed as error:
            log.warning("%s", error.message)

    async def _end_non_clients(self, gpu: _Gpu, end: EndWorker) -> None:
        """End workers that take calls but are not clients: they use the whole GPU, without limits."""
        if not self._checks_clients or not any(tenant.is_ready for tenant in gpu.tenants.values()):
            return
        try:
            clients = await gpu.daemon.clients()
        except ControlFailed:
            return  # the next check detects the problem
        for worker, tenant in list(gpu.tenants.items()):
            pids = {tenant.pid, *(processes.children(tenant.pid) if gpu.daemon.mounts is not None else ())}
            tenant.missed_checks = tenant.missed_checks + 1 if tenant.is_ready and pids.isdisjoint(clients) else 0
            if tenant.missed_checks == _CHECKS_UNTIL_NO_CLIENT:
                end(worker, f"{gpu.daemon.gpu}: it is not a client of the MPS daemon, so its share does not limit it")

    def _gpu(self, uuid: str) -> _Gpu:
        if uuid not in self._gpus:
            self._gpus[uuid] = _Gpu(self._daemon_factory.make(uuid), empty_since=self._clock.monotonic())
        return self._gpus[uuid]

    async def _match_containers(self, gpu: _Gpu, contained: bool) -> None:
        """Replace the daemon if needed. All clients must run in containers, or none: they share a user and memory."""
        if contained == (gpu.daemon.mounts is not None):
            return
        if gpu.tenants or gpu.joining > 1:  # another worker is joining
            place = "outside containers" if contained else "in containers"
            raise DeviceFailed(f"{gpu.daemon.gpu}: it is shared by workers that run {place}")
        await gpu.daemon.stop()
        gpu.daemon = self._daemon_factory.make(gpu.daemon.gpu, contained=contained)

    async def _start(self, gpu: _Gpu, start: Callable[[], Awaitable[None]]) -> None:
        try:
            await start()
        except DeviceFailed as error:
            gpu.trouble = HealthCondition(Health.DEGRADED, error.message.removeprefix(f"{gpu.daemon.gpu}: "))
            raise
        gpu.trouble = None

    async def _vacate(self, uuid: str) -> None:
        """Stop sharing the GPU: a worker needs it in another mode, so it must have no tenants."""
        if (gpu := self._gpus.get(uuid)) is None:
            return
        async with gpu.lock:
            if gpu.tenants or gpu.joining:
                raise DeviceFailed(f"{uuid}: workers still share it by MPS")
            await self._stop(gpu)

    async def _stop(self, gpu: _Gpu) -> None:
        """Stop the daemon. A worker that wants to join meanwhile waits for the lock and starts it again."""
        await gpu.daemon.stop()
        if not gpu.joining and self._gpus.get(gpu.daemon.gpu) is gpu:
            del self._gpus[gpu.daemon.gpu]
