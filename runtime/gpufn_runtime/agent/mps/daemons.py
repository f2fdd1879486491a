"""MPS by its first interface (v2): a control daemon for each GPU that is shared, all looked at every few seconds.

a worker comes      its GPU's daemon is started, unless it is there; the worker gets the environment of a client
a worker is READY   it must be among the daemon's clients; one that is not runs without limits, and is ended
the last one left   the daemon is stopped when nobody has come for a while, or when somebody wants the GPU for himself
an incident         one look in vain is none: a busy machine may keep a daemon from answering in time
                    1. nobody new is placed there  2. the tenants are told to their agent, which evicts and ends them
                    3. once they have left, or after a while, the server may be ACTIVE again; else the daemon is started
                    anew. After a FAULT its tenants are suspects
the agent starts    daemons that an earlier one left are taken over while they run; of others, all is put back
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from gpufn_core.domain.device import DeviceShare, Health, Share
from gpufn_core.domain.revision import RevisionKey
from gpufn_core.errors import DeviceFailed, FunctionStartFailed
from gpufn_platform.process.clock import Clock
from gpufn_runtime.agent.devices.base import Trouble
from gpufn_runtime.agent.mps.base import End, Joining
from gpufn_runtime.agent.mps.blame import INCIDENTS, Suspects
from gpufn_runtime.agent.mps.client import PIPE_IN_CONTAINER, client_environment
from gpufn_runtime.agent.mps.condition import Condition
from gpufn_runtime.agent.mps.control import Control, ControlFailed
from gpufn_runtime.agent.mps.daemon import Daemon
from gpufn_runtime.agent.mps.daemon_factory import DaemonMaker
from gpufn_runtime.agent.workers import processes

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_LINGER_S = 30.0  # a start takes about a second; a function that scales to zero and back must not pay it each time
_LEAVE_S = 10.0
_EVICT_S = 3.0
_LOOKS_UNTIL_A_CLIENT = 2
_LOOKS_UNTIL_HUNG = 2


@dataclass
class _Tenant:
    key: RevisionKey
    pid: int  # of its process; of its container's first, whose child it is
    is_ready: bool = False
    looks_without: int = 0  # at which it was READY and no client


@dataclass
class _Gpu:
    daemon: Daemon
    tenants: dict[str, _Tenant] = field(default_factory=dict)  # by worker
    trouble: Trouble | None = None
    empty_since: float = 0.0
    silent_looks: int = 0  # one after the other, to which it did not answer
    joining: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    emptied: asyncio.Event = field(default_factory=asyncio.Event)


class MpsDaemons:
    def __init__(
        self,
        maker: DaemonMaker,
        clock: Clock,
        *,
        look_every_s: float = _LOOK_EVERY_S,
        linger_s: float = _LINGER_S,
        leave_s: float = _LEAVE_S,
        evict_s: float = _EVICT_S,
    ) -> None:
        self._maker = maker
        self._clock = clock
        self._look_every_s = look_every_s
        self._linger_s = linger_s
        self._leave_s = leave_s
        self._evict_s = evict_s
        self._gpus: dict[str, _Gpu] = {}
        self._gpu_of: dict[str, str] = {}  # by worker
        self.suspects = Suspects()

    # --- what the agent asks ------------------------------------------------------------------------------------------

    @property
    def is_asking(self) -> bool:
        return Control.asking > 0

    @property
    def pids(self) -> frozenset[int]:
        known = (gpu.daemon.process for gpu in self._gpus.values())
        return frozenset(process.pid for process in known if process is not None)

    @contextlib.asynccontextmanager
    async def joining(
        self, key: RevisionKey, share: DeviceShare, *, contained: bool = False
    ) -> AsyncGenerator[Joining, None]:
        if share.mode is not Share.MPS:
            for uuid in share.gpus:
                await self._vacate(uuid)
            yield Joining()
            return
        if key in self.suspects.quarantined:
            raise FunctionStartFailed(
                f"{key[0]}@{key[1]} starts no more on shared GPUs of this node: it was there when one failed, "
                f"{INCIDENTS} times in a row. Deploy it again when it is mended, or with share='exclusive'."
            )
        (uuid,) = share.gpus
        gpu = self._gpu(uuid)
        gpu.joining += 1
        try:
            async with gpu.lock:
                await self._suit(gpu, contained)
                if not gpu.daemon.is_running():
                    await self._start(gpu)
                if gpu.trouble is not None:
                    raise DeviceFailed(f"{uuid}: {gpu.trouble.reason}")
            mounts = gpu.daemon.mounts
            yield Joining(client_environment(share, gpu.daemon.pipe if mounts is None else PIPE_IN_CONTAINER), mounts)
        finally:
            gpu.joining -= 1
            gpu.empty_since = self._clock.monotonic()

    def joined(self, worker: str, key: RevisionKey, share: DeviceShare, pid: int) -> None:
        if share.mode is Share.MPS:
            (uuid,) = share.gpus
            self._gpu_of[worker] = uuid
            self._gpu(uuid).tenants[worker] = _Tenant(key, pid)

    def is_ready(self, worker: str) -> None:
        if (tenant := self._tenant(worker)) is not None:
            tenant.is_ready = True

    async def evict(self, worker: str, pids: Iterable[int]) -> None:
        uuid = self._gpu_of.get(worker)
        if uuid is None:
            return
        try:
            async with asyncio.timeout(self._evict_s):
                await self._gpus[uuid].daemon.terminate(pids)
        except (ControlFailed, TimeoutError) as error:
            log.info("%s: %s is ended without MPS's help: %s", uuid, worker, error)

    def left(self, worker: str) -> None:
        uuid = self._gpu_of.pop(worker, None)
        if uuid is None:
            return
        gpu = self._gpus[uuid]
        del gpu.tenants[worker]
        if not gpu.tenants:
            gpu.empty_since = self._clock.monotonic()
            gpu.emptied.set()

    def trouble(self, gpu: str) -> Trouble | None:
        known = self._gpus.get(gpu)
        return known.trouble if known is not None else None

    async def run(self, end: End) -> None:
        while True:
            for uuid in list(self._gpus):
                try:
                    await self.look(uuid, end)
                except Exception:
                    log.exception("%s: a look at its MPS daemon failed", uuid)
            await asyncio.sleep(self._look_every_s)

    async def stop(self) -> None:
        known, self._gpus = self._gpus, {}
        self._gpu_of.clear()
        for gpu in known.values():
            async with gpu.lock:
                await gpu.daemon.stop()

    # --- daemons that were there before us ----------------------------------------------------------------------------

    async def take_over(self) -> None:
        """Before any worker is adopted."""
        for own in self._maker.left():
            if own.is_running():
                log.info("%s: its MPS daemon goes on", own.gpu)
                self._gpus[own.gpu] = _Gpu(own, empty_since=self._clock.monotonic())
            else:
                await own.stop()

    # --- looking after them -------------------------------------------------------------------------------------------

    async def look(self, uuid: str, end: End) -> None:
        """What is done every few seconds, for one GPU."""
        gpu = self._gpus.get(uuid)
        if gpu is None:
            return
        async with gpu.lock:
            if self._gpus.get(uuid) is not gpu:
                return  # it was stopped while we waited, and is nobody's
            empty_s = self._clock.monotonic() - gpu.empty_since
            if not gpu.tenants and not gpu.joining and empty_s >= self._linger_s:
                await self._stop(gpu)
                return
            gpu.daemon.keep_logs_small()
            found = await gpu.daemon.observe()
            gpu.silent_looks = gpu.silent_looks + 1 if found is Condition.HUNG else 0
            if found is Condition.HUNG and gpu.silent_looks < _LOOKS_UNTIL_HUNG:
                log.info("%s: %s; it is asked again", uuid, found.value)
            elif found.is_incident:
                await self._on_incident(gpu, found, end)
            elif found is Condition.ACTIVE:
                gpu.trouble = None
                await self._find_strangers(gpu, end)

    async def _on_incident(self, gpu: _Gpu, found: Condition, end: End) -> None:
        uuid = gpu.daemon.gpu
        gpu.trouble = Trouble(Health.DEGRADED, found.value)
        there = sorted({tenant.key for tenant in gpu.tenants.values()})
        log.warning("%s: %s; tenants=%s", uuid, found.value, ",".join(f"{name}@{number}" for name, number in there))
        if found is Condition.FAULT:
            before = set(self.suspects.quarantined)
            self.suspects.record(uuid, there, self._clock.monotonic())
            for name, number in sorted(self.suspects.quarantined - before):
                log.warning("%s@%d is quarantined: it was there at %d faults in a row", name, number, INCIDENTS)
        gpu.emptied.clear()
        for worker in list(gpu.tenants):
            end(worker, f"{uuid}: {found.value}")
        if gpu.tenants:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._leave_s):
                    await gpu.emptied.wait()
        if await gpu.daemon.observe() is not Condition.ACTIVE:
            try:
                await gpu.daemon.restart()
            except DeviceFailed as error:
                gpu.trouble = Trouble(Health.DEGRADED, error.message.removeprefix(f"{uuid}: "))
                log.warning("%s", error.message)
                return
        gpu.trouble = None

    async def _find_strangers(self, gpu: _Gpu, end: End) -> None:
        """Workers that take calls and are no clients: they have the whole GPU, and no limit."""
        if not any(tenant.is_ready for tenant in gpu.tenants.values()):
            return
        try:
            clients = await gpu.daemon.clients()
        except ControlFailed:
            return  # the next look says what is wrong
        for worker, tenant in list(gpu.tenants.items()):
            pids = {tenant.pid, *(processes.children(tenant.pid) if gpu.daemon.mounts is not None else ())}
            tenant.looks_without = tenant.looks_without + 1 if tenant.is_ready and pids.isdisjoint(clients) else 0
            if tenant.looks_without == _LOOKS_UNTIL_A_CLIENT:
                end(worker, f"{gpu.daemon.gpu}: it runs outside of its share: it is no client of the MPS daemon")

    # --- inside -------------------------------------------------------------------------------------------------------

    def _gpu(self, uuid: str) -> _Gpu:
        gpu = self._gpus.get(uuid)
        if gpu is None:
            gpu = self._gpus[uuid] = _Gpu(self._maker.make(uuid), empty_since=self._clock.monotonic())
        return gpu

    async def _suit(self, gpu: _Gpu, contained: bool) -> None:
        """A daemon's clients are one user's, and share memory with it: so all live in containers, or none."""
        if contained == (gpu.daemon.mounts is not None):
            return
        if gpu.tenants or gpu.joining > 1:  # somebody else is on the way
            where = "out of containers" if contained else "in containers"
            raise DeviceFailed(f"{gpu.daemon.gpu}: it is shared by workers that live {where}")
        await gpu.daemon.stop()
        gpu.daemon = self._maker.make(gpu.daemon.gpu, contained=contained)

    async def _start(self, gpu: _Gpu) -> None:
        try:
            await gpu.daemon.start()
        except DeviceFailed as error:
            gpu.trouble = Trouble(Health.DEGRADED, error.message.removeprefix(f"{gpu.daemon.gpu}: "))
            raise
        gpu.trouble = None

    async def _vacate(self, uuid: str) -> None:
        """Somebody wants this GPU in another mode, so its lease is free."""
        gpu = self._gpus.get(uuid)
        if gpu is None:
            return
        async with gpu.lock:
            if gpu.tenants or gpu.joining:
                raise DeviceFailed(f"{uuid}: workers share it by MPS still")
            await self._stop(gpu)

    async def _stop(self, gpu: _Gpu) -> None:
        """Until a worker comes, who may do so while it is being stopped, and waits to start it anew."""
        await gpu.daemon.stop()
        if not gpu.joining and self._gpus.get(gpu.daemon.gpu) is gpu:
            del self._gpus[gpu.daemon.gpu]

    def _tenant(self, worker: str) -> _Tenant | None:
        uuid = self._gpu_of.get(worker)
        return self._gpus[uuid].tenants.get(worker) if uuid is not None else None
