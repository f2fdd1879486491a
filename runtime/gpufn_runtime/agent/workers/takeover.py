"""Takeover from an earlier agent, by the folders that it or the runner created. At the start of an agent:

| the recorded process | assignment | reaction |
|---|---|---|
| runs | any | adopt the worker; if it is not assigned, stop it |
| has ended, or none is recorded | none | remove the folder |
| has ended, or none is recorded | yes | report the exit, remove the worker's resources and its Assignment |
| no agent has begun work in the folder | yes | nothing: the worker is launched like any other |
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterable, Mapping

from gpufn_core.domain.worker import Assignment
from gpufn_core.errors import SecretNotFound
from gpufn_core.protocol.reports import WorkerEventKind
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.redaction import Patterns, patterns_of
from gpufn_runtime.agent.decide.fleet import Fleet, WorkerRecord
from gpufn_runtime.agent.reports import Reports
from gpufn_runtime.agent.workers import processes
from gpufn_runtime.agent.workers.cleanup import Cleanup
from gpufn_runtime.agent.workers.secret_values import Secrets
from gpufn_runtime.agent.workers.supervise import Supervisor, exit_of
from gpufn_runtime.agent.workers.worker_folder import ProcessFile, WorkerFolder

log = logging.getLogger(__name__)


class Takeover:
    def __init__(self, fleet: Fleet, supervisor: Supervisor, cleanup: Cleanup, reports: Reports) -> None:
        self._fleet = fleet
        self._supervisor = supervisor
        self._cleanup = cleanup
        self._reports = reports

    def take_over(
        self,
        folders: Iterable[WorkerFolder],
        assigned: Mapping[str, Assignment],
        secret_patterns: Mapping[str, Patterns],
    ) -> None:
        """`secret_patterns`: see `secret_patterns_of`."""
        for folder in folders:
            file, assignment = folder.read_process(), assigned.get(folder.worker)
            is_running = file is not None and processes.is_running(file.process)
            pidfd = processes.open_pidfd(file.process) if file is not None and is_running else None
            if file is not None and pidfd is not None:
                self._adopt(folder, file, pidfd, assignment, secret_patterns.get(folder.worker, ()))
            elif assignment is None:
                log.info("removing the folder of worker %s, which is not assigned", folder.worker)
                self._cleanup.sweep(folder, file)
            elif folder.was_begun:
                self._clean_up(folder, file, assignment)

    def _adopt(
        self,
        folder: WorkerFolder,
        file: ProcessFile,
        pidfd: int,
        assignment: Assignment | None,
        secret_patterns: Patterns,
    ) -> None:
        record = WorkerRecord(file.worker, file.function, file.revision, assignment, started_at=file.started_at)
        group = self._cleanup.find_group(file.worker, file)
        handle = processes.Handle(file.process, pidfd)
        self._supervisor.supervise(
            record, handle, folder, group, folder.open_output(),
            container=file.container, secret_patterns=secret_patterns,
        )  # fmt: skip
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


async def secret_patterns_of(folders: Iterable[WorkerFolder], secrets: Secrets) -> dict[str, Patterns]:
    """Return the values to mask in the output of adopted workers, by worker. A value that changed, or that another
    secret replaced, while no agent ran is not known any more."""
    patterns: dict[str, Patterns] = {}
    for folder in folders:
        if (spec := folder.spec()) is not None and spec.secrets:
            try:
                patterns[folder.worker] = patterns_of((await secrets.values(spec, {})).values())
            except (SecretNotFound, InvalidSetting) as error:
                log.warning("the output of worker %s is not redacted: %s", folder.worker, error)
    return patterns
