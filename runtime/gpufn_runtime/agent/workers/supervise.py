"""What becomes of the workers whose processes run: what they write is read as it comes, and their end is told at once.

a process ends
    1. kill its group, reap it, read the rest of its output; 2. `exited` goes out, for a runner waits for it;
    3. it is buried
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.domain.worker import END_TOLD_WITHIN_S, Exit
from gpufn_core.errors import PlatformError
from gpufn_core.protocol.reports import WorkerEventKind
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_runtime.agent.decide.fleet import Phase, WorkerRecord
from gpufn_runtime.agent.launchers.base import ContainerEnd, Containers
from gpufn_runtime.agent.mps.base import GpuShares
from gpufn_runtime.agent.reports import Reports
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cgroups import MemoryGroup
from gpufn_runtime.agent.workers.cleanup import Burials
from gpufn_runtime.agent.workers.output import OutputLog
from gpufn_runtime.agent.workers.running_workers import Living, RunningWorker
from gpufn_runtime.agent.workers.worker_folder import WorkerFolder

log = logging.getLogger(__name__)

_READ_BYTES = 64 << 10
_LAST_READS = 32  # what a pipe can hold when its writer dies is far less than this many reads
_PARTIAL_LINE_S = 1.0


class Running:
    """`doubt` is told of a revision of which a worker has ended before it was ready."""

    def __init__(
        self,
        living: Living,
        *,
        containers: Containers,
        shares: GpuShares,
        burials: Burials,
        reports: Reports,
        doubt: Callable[[RevisionKey], None],
        clock: Clock,
    ) -> None:
        self._living = living
        self._containers = containers
        self._shares = shares
        self._burials = burials
        self._reports = reports
        self._doubt = doubt
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._endings = Tasks()
        self._one_gone = asyncio.Event()

    def attend(
        self,
        record: WorkerRecord,
        handle: processes.Handle,
        folder: WorkerFolder,
        group: MemoryGroup | None,
        fifo: int,
        *,
        container: str,
    ) -> None:
        """Read its output, on `fifo`, and report its end, though it have ended already. `fifo` and the pidfd are ours
        from now on."""
        process, pidfd = handle
        output = OutputLog(self._clock.monotonic())
        worker = RunningWorker(record, process, folder, group, output, fifo, pidfd, container)
        self._living.add(worker)
        record.process, record.phase = process, Phase.RUNNING
        if record.assignment is not None:
            self._shares.joined(record.worker, record.key, record.assignment.share, process.pid)
        self._loop.add_reader(fifo, self._on_output, worker)
        self._loop.add_reader(pidfd, self._on_exit, worker)

    def end(self, record: WorkerRecord, how: signal.Signals, reason: str) -> None:
        """A worker that is being launched is ended as soon as it has a process."""
        log.info("%s gets %s: %s", record.worker, how.name, reason)
        if record.asked_to_end_at is None:
            record.asked_to_end_at = self._clock.monotonic()
        if how is signal.SIGKILL and not record.killed:
            record.killed, record.killed_for = True, reason
        worker = self._living.get(record.worker)
        if worker is None:
            return
        if how is signal.SIGKILL and record.shares_by_mps:
            self._endings.start(self._evict_and_kill(worker), f"evict-{record.worker}")
        else:
            worker.signal(how)

    def step(self, now: float) -> None:
        """Lines that have waited for their end go out as they are."""
        for worker in self._living:
            self._reports.log_lines(worker.record, worker.output.flush(now, older_than_s=_PARTIAL_LINE_S))

    async def none_left(self) -> None:
        while self._living:
            self._one_gone.clear()
            await self._one_gone.wait()

    async def all_told(self) -> None:
        """Until it is known, and said, of each that has gone how it ended."""
        await self._endings.done()

    def let_go(self) -> None:
        """They live on."""
        self._endings.cancel()
        for worker in self._living:
            self._living.remove(worker)
            for descriptor in (worker.pidfd, worker.fifo):
                self._loop.remove_reader(descriptor)
                os.close(descriptor)

    async def _evict_and_kill(self, worker: RunningWorker) -> None:
        await self._shares.evict(worker.record.worker, worker.pids)
        if self._living.get(worker.record.worker) is worker:
            worker.signal(signal.SIGKILL)

    def _on_output(self, worker: RunningWorker) -> None:
        """One read at a time: a worker that floods us shares the loop with the rest."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(worker.fifo, _READ_BYTES)
            self._reports.log_lines(worker.record, worker.output.feed(data, self._clock.monotonic()))

    def _on_exit(self, worker: RunningWorker) -> None:
        record = worker.record
        self._loop.remove_reader(worker.pidfd)
        self._living.remove(worker)
        self._one_gone.set()
        worker.signal(signal.SIGKILL)  # the rest of its group
        os.close(worker.pidfd)
        code, signum = processes.reap(worker.process.pid)
        if worker.container:
            self._endings.start(self._ask_how_it_ended(worker), f"end-{record.worker}")
        else:
            self._has_ended(worker, code, signum)

    async def _ask_how_it_ended(self, worker: RunningWorker) -> None:
        """Its parent is Docker's."""
        end, untold = ContainerEnd(), ""
        try:
            async with asyncio.timeout(END_TOLD_WITHIN_S):
                end = await self._containers.end_of(worker.container)
        except PlatformError as error:
            untold = error.message.rstrip(".")
        except TimeoutError:
            untold = f"how container {worker.container[:12]} ended was not to be learned within {END_TOLD_WITHIN_S:g} s"
        if untold:
            log.warning("%s: %s", worker.record.worker, untold)
        self._containers.let_go(worker.container)
        self._has_ended(worker, end.code, end.signal, exceeded_bytes=end.exceeded_bytes, untold=untold)

    def _has_ended(
        self,
        worker: RunningWorker,
        code: int | None,
        signum: int | None,
        *,
        exceeded_bytes: int | None = None,
        untold: str = "",
    ) -> None:
        record = worker.record
        self._shares.left(record.worker)
        self._read_rest(worker)
        # Whatever we did to it as well: the runner orders a kill when a socket closes; the kernel may have been first.
        could_be_oom = signum == signal.SIGKILL or code is signum is None
        end = exit_of(
            worker.group if could_be_oom else None,
            code=code,
            signal=signum,
            tail=worker.output.tail(),
            device_fault=record.device_fault,
            stopping=record.stopping,
            untold=untold,
            killed_for=record.killed_for,
        )
        if could_be_oom and exceeded_bytes is not None:
            end = msgspec.structs.replace(end, out_of_memory=True, memory_limit_bytes=exceeded_bytes)
        if not record.was_ready:
            self._doubt(record.key)
        log.info("%s %s", record, end.describe())
        self._reports.tell(record, WorkerEventKind.EXITED, exit=end)
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


def exit_of(group: MemoryGroup | None, **what: Any) -> Exit:
    """With what the kernel says about the group: its counter is raised before the process gets its SIGKILL."""
    if group is None or not group.has_killed():
        return Exit(**what)
    return Exit(out_of_memory=True, memory_limit_bytes=group.limit_bytes(), **what)
