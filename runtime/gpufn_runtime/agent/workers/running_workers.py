"""Running workers and their resources. `supervise` adds and removes workers; other modules read."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from gpufn_core.protocol.reports import ProcessReport
from gpufn_runtime.agent.decide.fleet import WorkerRecord
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cgroups import MemoryGroup
from gpufn_runtime.agent.workers.output import OutputLog
from gpufn_runtime.agent.workers.worker_folder import WorkerFolder


@dataclass
class RunningWorker:
    """A worker with a process. `fifo` and `pidfd` are open; the supervisor closes them."""

    record: WorkerRecord
    process: processes.Process
    folder: WorkerFolder
    group: MemoryGroup | None
    output: OutputLog
    fifo: int
    pidfd: int
    container: str = ""  # container id; `process` is the container's first process

    @property
    def pids(self) -> list[int]:
        """The pids of all known processes of the worker."""
        main_pid = self.process.pid
        if self.container:
            return [main_pid, *processes.children_of(self.process)]
        return [main_pid, *(pid for pid in (self.group.pids() if self.group is not None else ()) if pid != main_pid)]

    def signal(self, signum: signal.Signals) -> None:
        """Signal all processes of the worker."""
        if self.container and signum is signal.SIGKILL:
            # The first process exits with the worker's status. If it were killed, the status would be lost.
            processes.kill_each(processes.children_of(self.process))
            return
        processes.signal_group(self.process, signum, self.pidfd)
        if signum is signal.SIGKILL and self.group is not None:
            self.group.kill()

    def report(self, gpus_busy: float | None = None, gpu_bytes: dict[str, int] | None = None) -> ProcessReport:
        record = self.record
        # In a container the worker and its orphans are children of the first process.
        pids = self.pids if self.container else [self.process.pid]
        return ProcessReport(
            worker=record.worker,
            function=record.function,
            revision=record.revision,
            pid=self.process.pid,
            started_at=record.started_at,
            resident_bytes=sum(map(processes.resident_bytes, pids)),
            share=record.assignment.share if record.assignment else None,
            gpus_busy=gpus_busy,
            gpu_bytes=gpu_bytes or {},
            parked=record.parked,
            rank=record.assignment.rank if record.assignment is not None and record.assignment.gang else None,
        )


RunningWorkers = dict[str, RunningWorker]  # by worker id
