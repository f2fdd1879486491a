"""Parked workers: a worker's report about released memory is a Claim until a GPU sample confirms it."""

from __future__ import annotations

import logging
import signal

from gpufn_core.domain.worker import ParkedMemory, WorkerState
from gpufn_core.protocol.reports import WorkerReport
from gpufn_runtime.agent.decide.fleet import WorkerRecord
from gpufn_runtime.agent.decide.parking_check import Claim, verify
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.reports import Reports
from gpufn_runtime.agent.workers.running_workers import RunningWorkers
from gpufn_runtime.agent.workers.supervise import Supervisor

log = logging.getLogger(__name__)


class Parking:
    """Report verified parked workers. End workers that still hold GPU memory."""

    def __init__(
        self, devices: DeviceWatch, running_workers: RunningWorkers, supervisor: Supervisor, reports: Reports
    ) -> None:
        self._devices = devices
        self._running_workers = running_workers
        self._supervisor = supervisor
        self._reports = reports

    def note(self, record: WorkerRecord, report: WorkerReport) -> None:
        """Record the state that the runner reports for a worker."""
        if report.state in (WorkerState.READY, WorkerState.RESUMING):
            record.claim = record.parked = None
        elif report.state is WorkerState.PARKED and report.parked is not None and record.claim is None:
            # Without a GPU there is nothing to verify.
            record.claim = Claim(report.parked, self._devices.samples_begun if record.gpus else -1)
            self._devices.sample_now()
            self.verify()

    def verify(self) -> None:
        """Verify open claims with the latest sample."""
        for worker in self._running_workers.values():
            record = worker.record
            if record.claim is None or record.parked is not None:
                continue
            held = self._devices.gpu_bytes_of(worker.pids, record.gpus)
            match verify(record.claim, self._devices.samples_received, max(held.values(), default=None)):
                case ParkedMemory() as parked:
                    record.parked = parked
                    memory = f"host_bytes={parked.host_bytes} device_bytes={parked.device_bytes}"
                    log.info("worker %s is parked: %s", record.worker, memory)
                    self._reports.send_soon()
                case str(reason) if record.end_requested_at is None:
                    self._supervisor.end(record, signal.SIGTERM, reason)
