"""Supervision of running workers: reads their output and reports their end at once.

When a process ends:
    1. kill its process group, reap it, and read the rest of its output; 2. send EXITED, which a runner waits for;
    3. clean up
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from gpufn_core.domain.revision import RevisionKey
from gpufn_core.domain.worker import EXIT_REPORT_WITHIN_S, Exit
from gpufn_core.errors import PlatformError
from gpufn_core.protocol.launch import EXIT_GPU_FAULT
from gpufn_core.protocol.reports import WorkerEventKind
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.tasks import Tasks
from gpufn_platform.secrets.redaction import Patterns, Redactor
from gpufn_runtime.agent.decide.fleet import Phase, WorkerRecord
from gpufn_runtime.agent.launchers.base import ContainerEnd, Containers
from gpufn_runtime.agent.mps.base import GpuShares
from gpufn_runtime.agent.reports import Reports
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cgroups import MemoryGroup
from gpufn_runtime.agent.workers.cleanup import Cleanup
from gpufn_runtime.agent.workers.output import OutputLog
from gpufn_runtime.agent.workers.running_workers import RunningWorker, RunningWorkers
from gpufn_runtime.agent.workers.worker_folder import WorkerFolder

log = logging.getLogger(__name__)

_READ_BYTES = 64 << 10
_LAST_READS = 32  # more than a pipe can hold when its writer dies
_PARTIAL_LINE_S = 1.0


class Supervisor:
    """Supervises running workers. `recheck` is called with the revision of a worker that ends before it was ready,
    `prove_cuda` with the unused GPUs of a worker whose end CUDA may have caused."""

    def __init__(
        self,
        running_workers: RunningWorkers,
        *,
        containers: Containers,
        shares: GpuShares,
        cleanup: Cleanup,
        reports: Reports,
        recheck: Callable[[RevisionKey], None],
        prove_cuda: Callable[[Iterable[str]], None],
        clock: Clock,
    ) -> None:
        self._running_workers = running_workers
        self._containers = containers
        self._shares = shares
        self._cleanup = cleanup
        self._reports = reports
        self._recheck = recheck
        self._prove_cuda = prove_cuda
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.ending_tasks = Tasks()  # ends that are being ordered or reported
        self._worker_ended = asyncio.Event()

    def supervise(
        self,
        record: WorkerRecord,
        handle: processes.Handle,
        folder: WorkerFolder,
        group: MemoryGroup | None,
        fifo: int,
        *,
        container: str,
        secret_patterns: Patterns = (),
    ) -> None:
        """Supervise the worker: read its output from `fifo` and report its end, even if it has ended already. Takes
        ownership of `fifo` and the pidfd. `secret_patterns` are masked in the output."""
        process, pidfd = handle
        redactor = Redactor(secret_patterns) if secret_patterns else None
        output = OutputLog(self._clock.monotonic(), redactor)
        worker = RunningWorker(record, process, folder, group, output, fifo, pidfd, container)
        self._running_workers[record.worker] = worker
        record.process, record.phase = process, Phase.RUNNING
        if record.assignment is not None:
            self._shares.worker_joined(record.worker, record.key, record.assignment.share, process.pid)
        self._loop.add_reader(fifo, self._on_output, worker)
        self._loop.add_reader(pidfd, self._on_exit, worker)

    def end(self, record: WorkerRecord, signum: signal.Signals, reason: str) -> None:
        """Send a signal to the worker. A worker that is still being launched is ended once it has a process."""
        log.info("worker %s gets %s: %s", record.worker, signum.name, reason)
        if record.end_requested_at is None:
            record.end_requested_at = self._clock.monotonic()
        if signum is signal.SIGKILL and not record.killed:
            record.killed, record.killed_for = True, reason
        if (worker := self._running_workers.get(record.worker)) is None:
            return
        if signum is signal.SIGKILL and record.shares_by_mps:
            self.ending_tasks.start(self._evict_and_kill(worker), f"evict-{record.worker}")
        else:
            worker.signal(signum)

    def step(self, now: float) -> None:
        """Publish lines that have waited too long for their line end."""
        for worker in self._running_workers.values():
            self._reports.log_lines(worker.record, worker.output.flush(now, older_than_s=_PARTIAL_LINE_S))

    async def all_ended(self) -> None:
        while self._running_workers:
            self._worker_ended.clear()
            await self._worker_ended.wait()

    def release(self) -> None:
        """Stop the supervision. The workers live on."""
        self.ending_tasks.cancel()
        for worker in self._running_workers.values():
            for descriptor in (worker.pidfd, worker.fifo):
                self._loop.remove_reader(descriptor)
                os.close(descriptor)
        self._running_workers.clear()

    async def _evict_and_kill(self, worker: RunningWorker) -> None:
        await self._shares.evict(worker.record.worker, worker.pids)
        if self._running_workers.get(worker.record.worker) is worker:
            worker.signal(signal.SIGKILL)

    def _on_output(self, worker: RunningWorker) -> None:
        """Read once per callback, so that a worker that floods its output does not block the event loop."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(worker.fifo, _READ_BYTES)
            self._reports.log_lines(worker.record, worker.output.feed(data, self._clock.monotonic()))

    def _on_exit(self, worker: RunningWorker) -> None:
        record = worker.record
        self._loop.remove_reader(worker.pidfd)
        del self._running_workers[record.worker]
        self._worker_ended.set()
        worker.signal(signal.SIGKILL)  # the rest of its process group
        os.close(worker.pidfd)
        code, signum = processes.reap(worker.process.pid)
        if worker.container:
            self.ending_tasks.start(self._fetch_container_end(worker), f"end-{record.worker}")
        else:
            self._on_end(worker, code, signum)

    async def _fetch_container_end(self, worker: RunningWorker) -> None:
        """Get the exit status from Docker, which is the parent of the container's process."""
        end, unknown_reason = ContainerEnd(), ""
        try:
            async with asyncio.timeout(EXIT_REPORT_WITHIN_S):
                end = await self._containers.end_of(worker.container)
        except PlatformError as error:
            unknown_reason = error.message.rstrip(".")
        except TimeoutError:
            unknown_reason = (
                f"the exit status of container {worker.container[:12]} was not known within {EXIT_REPORT_WITHIN_S:g} s"
            )
        if unknown_reason:
            log.warning("worker %s: %s", worker.record.worker, unknown_reason)
        self._containers.release(worker.container)
        self._on_end(worker, end.code, end.signal, exceeded_bytes=end.exceeded_bytes, unknown_reason=unknown_reason)

    def _on_end(
        self,
        worker: RunningWorker,
        code: int | None,
        signum: int | None,
        *,
        exceeded_bytes: int | None = None,
        unknown_reason: str = "",
    ) -> None:
        record = worker.record
        self._shares.worker_ended(record.worker)
        self._read_rest(worker)
        # Even if we sent SIGKILL: the runner orders a kill when the socket closes, and the kernel may have been first.
        could_be_oom = signum == signal.SIGKILL or code is signum is None
        end = exit_of(
            worker.group if could_be_oom else None,
            code=code,
            signal=signum,
            tail=worker.output.tail(),
            device_fault=record.device_fault,
            stopping=record.stopping,
            unknown_reason=unknown_reason,
            killed_for=record.killed_for,
        )
        if could_be_oom and exceeded_bytes is not None:
            end = msgspec.structs.replace(end, out_of_memory=True, memory_limit_bytes=exceeded_bytes)
        if not record.was_ready:
            self._recheck(record.key)
        if may_concern_cuda(was_ready=record.was_ready, code=code):
            # The proof's context takes memory, which other workers of the GPU may need.
            others = [other for other in self._running_workers.values() if other is not worker]
            in_use = {gpu for other in others for gpu in other.record.gpus}
            self._prove_cuda(gpu for gpu in record.gpus if gpu not in in_use)
        log.info("%s %s", record, end.describe())
        self._reports.send_event(record, WorkerEventKind.EXITED, exit=end)
        self._reports.send_soon()
        self._cleanup.clean_up(record, worker.folder, worker.group)

    def _read_rest(self, worker: RunningWorker) -> None:
        self._loop.remove_reader(worker.fifo)
        now = self._clock.monotonic()
        with contextlib.suppress(BlockingIOError):
            for _ in range(_LAST_READS):
                self._reports.log_lines(worker.record, worker.output.feed(os.read(worker.fifo, _READ_BYTES), now))
        self._reports.log_lines(worker.record, worker.output.flush(now))
        os.close(worker.fifo)


def may_concern_cuda(*, was_ready: bool, code: int | None) -> bool:
    """Return whether CUDA may be the cause of a worker's end. A worker that does not start may be killed by its runner
    before it exits with the code."""
    return code == EXIT_GPU_FAULT or (code is None and not was_ready)


def exit_of(group: MemoryGroup | None, **fields: Any) -> Exit:
    """Return the Exit, with the cgroup's OOM state: the kernel counts an OOM kill before the process gets SIGKILL."""
    if group is None or not group.has_killed():
        return Exit(**fields)
    return Exit(out_of_memory=True, memory_limit_bytes=group.limit_bytes(), **fields)
