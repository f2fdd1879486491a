"""Open circuits of functions, as the controller reports them, so that nested calls of such a function fail at once."""

from __future__ import annotations

import msgspec

from gpufn_core.domain.circuit_errors import start_failure
from gpufn_core.domain.revision import Revision
from gpufn_core.protocol import subjects
from gpufn_core.protocol.report_parts import Statuses
from gpufn_core.protocol.reports import ControllerReport
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.leader_lease import Fence
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.process.clock import Clock
from gpufn_platform.queue.caller import Caller

_report = msgspec.msgpack.Decoder(ControllerReport)


class Circuits:
    def __init__(self, bus: Bus, caller: Caller, clock: Clock) -> None:
        self._bus = bus
        self._caller = caller
        self._clock = clock
        self._fence = Fence()
        self._statuses = Statuses()

    def start(self) -> None:
        self._bus.subscribe(subjects.CONTROLLER_REPORT, decoded(_report, self._on_report))

    def check(self, revision: Revision) -> None:
        """Check the revision's circuit. Raises Refused while it is open."""
        status = self._statuses.get(revision.function)
        if status is not None and (failure := start_failure(revision.number, status)) is not None:
            raise failure

    def _on_report(self, report: ControllerReport) -> None:
        if not self._fence.accepts(report.epoch, self._clock.monotonic()):
            return  # from a controller that has lost its lease without noticing yet
        self._statuses.take(report)
        for status in report.functions:
            if (failure := start_failure(status.serving, status)) is not None:
                self._caller.fail(status.function, status.serving, failure)
