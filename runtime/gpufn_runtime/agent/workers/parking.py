"""Parked workers: what a worker says that it has given up is a Claim until the GPU has been looked at."""

from __future__ import annotations

import logging
import signal

from gpufn_core.domain.worker import ParkedMemory, WorkerState
from gpufn_core.protocol.reports import WorkerReport
from gpufn_runtime.agent.decide.fleet import WorkerRecord
from gpufn_runtime.agent.decide.parking_proof import Claim, prove
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.reports import Reports
from gpufn_runtime.agent.workers.running_workers import Living
from gpufn_runtime.agent.workers.supervise import Running

log = logging.getLogger(__name__)


class Parking:
    """A proof is reported; a worker that still holds its GPU is ended."""

    def __init__(self, devices: DeviceWatch, living: Living, running: Running, reports: Reports) -> None:
        self._devices = devices
        self._living = living
        self._running = running
        self._reports = reports

    def note(self, record: WorkerRecord, report: WorkerReport) -> None:
        """What the runner tells of a worker."""
        if report.state in (WorkerState.READY, WorkerState.RESUMING):
            record.claim = record.parked = None
        elif report.state is WorkerState.PARKED and report.parked is not None and record.claim is None:
            # Without a GPU there is nothing to look at.
            record.claim = Claim(report.parked, self._devices.begun if record.gpus else -1)
            self._devices.hurry()
            self.prove()

    def prove(self) -> None:
        """By the last sample, what can be told by it."""
        for worker in self._living:
            record = worker.record
            if record.claim is None or record.parked is not None:
                continue
            held = self._devices.held_by(worker.pids, record.gpus)
            match prove(record.claim, self._devices.seen, max(held.values(), default=None)):
                case ParkedMemory() as parked:
                    record.parked = parked
                    log.info("%s is parked: host=%d left=%d", record.worker, parked.host_bytes, parked.device_bytes)
                    self._reports.send_soon()
                case str(reason) if record.asked_to_end_at is None:
                    self._running.end(record, signal.SIGTERM, reason)
