"""Takeover from an earlier agent: adopts running workers, cleans up after dead ones, removes unassigned folders."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Mapping

from gpufn_core.domain.worker import Assignment
from gpufn_core.protocol.reports import WorkerEventKind
from gpufn_runtime.agent.decide import reconcile
from gpufn_runtime.agent.decide.fleet import Fleet, WorkerRecord
from gpufn_runtime.agent.decide.reconcile import Adopt, CleanUp, ExistingFolder
from gpufn_runtime.agent.reports import Reports
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cleanup import Cleanup
from gpufn_runtime.agent.workers.supervise import Supervisor, exit_of
from gpufn_runtime.agent.workers.worker_folder import ProcessFile, WorkerFolder

log = logging.getLogger(__name__)


class Takeover:
    def __init__(self, fleet: Fleet, supervisor: Supervisor, cleanup: Cleanup, reports: Reports) -> None:
        self._fleet = fleet
        self._supervisor = supervisor
        self._cleanup = cleanup
        self._reports = reports

    def take_over(self, folders: Iterable[WorkerFolder], assigned: Mapping[str, Assignment]) -> None:
        by_name = {folder.worker: folder for folder in folders}
        files = {name: folder.read_process() for name, folder in by_name.items()}
        existing = [
            ExistingFolder(name, file is not None and processes.is_running(file.process), by_name[name].was_begun)
            for name, file in files.items()
        ]
        for action in reconcile.at_start(existing, assigned):
            folder, file = by_name[action.worker], files[action.worker]
            match action:
                case Adopt(worker) if file is not None:
                    self._adopt(folder, file, assigned.get(worker))
                case CleanUp(worker):
                    self._clean_up(folder, file, assigned[worker])
                case _:
                    log.info("removing the folder of worker %s, which is not assigned", action.worker)
                    self._cleanup.sweep(folder, file)

    def _adopt(self, folder: WorkerFolder, file: ProcessFile, assignment: Assignment | None) -> None:
        record = WorkerRecord(file.worker, file.function, file.revision, assignment, started_at=file.started_at)
        group = self._cleanup.find_group(file.worker, file)
        pidfd = processes.open_pidfd(file.process)
        if pidfd is None:
            if assignment is None:
                self._cleanup.sweep(folder, file)
            else:
                self._clean_up(folder, file, assignment)
            return
        handle = processes.Handle(file.process, pidfd)
        self._supervisor.attend(record, handle, folder, group, folder.open_output(), container=file.container)
        self._fleet.records[record.worker] = record
        log.info("adopted %s: pid=%d", record, file.process.pid)
        if assignment is None:
            self._supervisor.end(record, signal.SIGTERM, "it has no assignment")

    def _clean_up(self, folder: WorkerFolder, file: ProcessFile | None, assignment: Assignment) -> None:
        record = self._fleet.add(assignment)
        group = self._cleanup.find_group(record.worker, file)
        log.info("%s ended while no agent was running", record)
        # Kill before reporting: after the report its calls start again, and an unrecorded process may still run.
        processes.kill_worker(folder.output, folder.scratch)
        self._reports.send_event(
            record, WorkerEventKind.EXITED, exit=exit_of(group, unknown_reason="its node had no running agent")
        )
        self._cleanup.clean_up(record, folder, group)
