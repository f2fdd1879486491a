"""The workers whose processes run: what each holds, and all of them. `running` adds and removes, others look."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

from gpufn_core.protocol.reports import ProcessReport
from gpufn_runtime.agent.decide.fleet import WorkerRecord
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cgroups import MemoryGroup
from gpufn_runtime.agent.workers.output import OutputLog
from gpufn_runtime.agent.workers.worker_folder import WorkerFolder


@dataclass
class RunningWorker:
    """`fifo` and `pidfd` are open, and its owner's to close."""

    record: WorkerRecord
    process: processes.Process
    folder: WorkerFolder
    group: MemoryGroup | None
    output: OutputLog
    fifo: int
    pidfd: int
    container: str = ""  # its id; `process` is its first one

    @property
    def pids(self) -> list[int]:
        """Of all its processes, as far as they are known."""
        own = self.process.pid
        if self.container:
            return [own, *processes.children_of(self.process)]
        return [own, *(pid for pid in (self.group.pids() if self.group is not None else ()) if pid != own)]

    @property
    def resident_bytes(self) -> int:
        """In a container the worker is the first process's child, and so are the orphans that it has left."""
        own = self.process.pid
        return sum(map(processes.resident_bytes, self.pids if self.container else [own]))

    def signal(self, how: signal.Signals) -> None:
        """To all of it."""
        if self.container and how is signal.SIGKILL:
            # Its first process ends as the worker ends; killed itself, it could no longer say how that was.
            processes.kill_each(processes.children_of(self.process))
            return
        processes.signal_group(self.process, how, self.pidfd)
        if how is signal.SIGKILL and self.group is not None:
            self.group.kill()

    def report(self, gpus_busy: float | None = None, gpu_bytes: dict[str, int] | None = None) -> ProcessReport:
        record = self.record
        return ProcessReport(
            worker=record.worker,
            function=record.function,
            revision=record.revision,
            pid=self.process.pid,
            started_at=record.started_at,
            resident_bytes=self.resident_bytes,
            share=record.assignment.share if record.assignment else None,
            gpus_busy=gpus_busy,
            gpu_bytes=gpu_bytes or {},
            parked=record.parked,
        )


class Living:
    def __init__(self) -> None:
        self._workers: dict[str, RunningWorker] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[RunningWorker]:
        """Those of now: what is done to one may end it."""
        return iter(list(self._workers.values()))

    def get(self, worker: str) -> RunningWorker | None:
        return self._workers.get(worker)

    def add(self, worker: RunningWorker) -> None:
        self._workers[worker.record.worker] = worker

    def remove(self, worker: RunningWorker) -> None:
        del self._workers[worker.record.worker]
