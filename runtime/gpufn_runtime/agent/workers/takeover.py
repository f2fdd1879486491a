"""What an earlier agent left: its living workers are adopted, its dead buried, folders of nobody removed."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Mapping

from gpufn_core.domain.worker import Assignment
from gpufn_core.protocol.reports import WorkerEventKind
from gpufn_runtime.agent.decide import reconcile
from gpufn_runtime.agent.decide.fleet import Fleet, WorkerRecord
from gpufn_runtime.agent.decide.reconcile import Adopt, Bury, Found
from gpufn_runtime.agent.reports import Reports
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cleanup import Burials
from gpufn_runtime.agent.workers.supervise import Running, exit_of
from gpufn_runtime.agent.workers.worker_folder import ProcessFile, WorkerFolder

log = logging.getLogger(__name__)


class Inheritance:
    def __init__(self, fleet: Fleet, running: Running, burials: Burials, reports: Reports) -> None:
        self._fleet = fleet
        self._running = running
        self._burials = burials
        self._reports = reports

    def take_over(self, left: Iterable[WorkerFolder], assigned: Mapping[str, Assignment]) -> None:
        by_name = {folder.worker: folder for folder in left}
        files = {name: folder.read_process() for name, folder in by_name.items()}
        found = [
            Found(name, file is not None and processes.is_running(file.process), by_name[name].was_begun)
            for name, file in files.items()
        ]
        for action in reconcile.at_start(found, assigned):
            folder, file = by_name[action.worker], files[action.worker]
            match action:
                case Adopt(worker) if file is not None:
                    self._adopt(folder, file, assigned.get(worker))
                case Bury(worker):
                    self._bury(folder, file, assigned[worker])
                case _:
                    log.info("%s: what it left is removed", action.worker)
                    self._burials.sweep(folder, file)

    def _adopt(self, folder: WorkerFolder, file: ProcessFile, assignment: Assignment | None) -> None:
        record = WorkerRecord(file.worker, file.function, file.revision, assignment, started_at=file.started_at)
        group = self._burials.group_left(file.worker, file)
        pidfd = processes.open_pidfd(file.process)
        if pidfd is None:
            if assignment is None:
                self._burials.sweep(folder, file)
            else:
                self._bury(folder, file, assignment)
            return
        handle = processes.Handle(file.process, pidfd)
        self._running.attend(record, handle, folder, group, folder.open_output(), container=file.container)
        self._fleet.records[record.worker] = record
        log.info("%s is adopted: pid=%d", record, file.process.pid)
        if assignment is None:
            self._running.end(record, signal.SIGTERM, "nobody has assigned it")

    def _bury(self, folder: WorkerFolder, file: ProcessFile | None, assignment: Assignment) -> None:
        record = self._fleet.add(assignment)
        group = self._burials.group_left(record.worker, file)
        log.info("%s ended while no agent looked", record)
        # First: the report lets its calls start again, and a process that nobody wrote down may run on.
        processes.kill_worker(folder.output, folder.scratch)
        self._reports.tell(record, WorkerEventKind.EXITED, exit=exit_of(group, untold="its node had no agent then"))
        self._burials.bury(record, folder, group)
