"""A worker's process and what hangs on it: how it is signalled, what it takes, how its end is told."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from gpufn.protocol.messages import ProcessReport
from gpufn.workers import Exit
from gpufn_runtime.agent import processes
from gpufn_runtime.agent.cgroups import MemoryGroup
from gpufn_runtime.agent.fleet import WorkerRecord
from gpufn_runtime.agent.folders import WorkerFolder
from gpufn_runtime.agent.output import OutputLog


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
            return [own, *processes.children(own)]
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
            processes.kill_each(processes.children(self.process.pid))
            return
        processes.signal_group(self.process.pid, how)
        if how is signal.SIGKILL and self.group is not None:
            processes.kill_each(self.group.pids())

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


def exit_of(group: MemoryGroup | None, **what: Any) -> Exit:
    """With what the kernel says about the group: its counter is raised before the process gets its SIGKILL."""
    if group is None or not group.has_killed():
        return Exit(**what)
    return Exit(out_of_memory=True, memory_limit_bytes=group.limit_bytes(), **what)
