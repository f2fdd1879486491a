"""Parked workers: what a worker says that it has given up is a Claim until the GPU has been looked at."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpufn.protocol.reports import WorkerReport
from gpufn.workers import ParkedMemory, WorkerState
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.fleet import WorkerRecord
from gpufn_runtime.agent.proofs import Claim, prove
from gpufn_runtime.agent.running import Running

log = logging.getLogger(__name__)


class Parking:
    """`proven` is called after a proof; `refuted` gets a worker that still holds its GPU, and why it is to end."""

    def __init__(
        self,
        devices: DeviceWatch,
        running: Running,
        *,
        proven: Callable[[], None],
        refuted: Callable[[WorkerRecord, str], None],
    ) -> None:
        self._devices = devices
        self._running = running
        self._proven = proven
        self._refuted = refuted
        devices.on_sample = self.prove

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
        for worker in self._running:
            record = worker.record
            if record.claim is None or record.parked is not None:
                continue
            held = self._devices.held_by(worker.pids, record.gpus)
            match prove(record.claim, self._devices.seen, max(held.values(), default=None)):
                case ParkedMemory() as parked:
                    record.parked = parked
                    log.info("%s is parked: host=%d left=%d", record.worker, parked.host_bytes, parked.device_bytes)
                    self._proven()
                case str(reason) if record.asked_to_end_at is None:
                    self._refuted(record, reason)
