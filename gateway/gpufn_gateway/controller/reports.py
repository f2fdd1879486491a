"""The controller's reports and its log: a full ControllerReport each second, urgent changes at once.

A report is published in parts of a bounded size. A part that the bus refuses is logged once, and the other parts are
published: readers keep the last status of the functions in the missing part.
"""

from __future__ import annotations

import logging

from gpufn_core.errors import PayloadTooLarge, PlatformError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.report_parts import PART_BYTES, encode_parts
from gpufn_core.protocol.reports import ControllerReport, FunctionStatus
from gpufn_gateway.controller.decide.actions import Plan
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.leader_lease import LeaderLease
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)


class Reports:
    def __init__(self, bus: Bus, *, name: str, lease: LeaderLease, clock: Clock) -> None:
        self._bus = bus
        self._name = name
        self._lease = lease
        self._clock = clock
        self._statuses: dict[str, FunctionStatus] = {}
        self._undecided: dict[str, str] = {}  # function -> the error of its last failed decision
        self._problem = ""
        self._refusal = ""  # why a part of the last full report was not published
        self._sequence = 0

    def forget(self, function: str) -> None:
        self._statuses.pop(function, None)
        self._undecided.pop(function, None)

    def log_problem(self, problem: str) -> None:
        """Log a problem once, and its end once. An empty `problem` means that there is none."""
        if problem and not self._problem:
            log.warning("the controller keeps its last decisions: %s", problem, extra={"controller": self._name})
        elif self._problem and not problem:
            log.info("the controller makes decisions again", extra={"controller": self._name})
        self._problem = problem

    def log_failures(self, planned: Plan) -> None:
        """Log once per function and error."""
        for name, error in planned.failed.items():
            if self._undecided.get(name) != repr(error):
                self._undecided[name] = repr(error)
                log.error("no decision, the last one stands: %r", error, exc_info=error, extra={"function": name})
        for name in self._undecided.keys() & planned.statuses.keys():
            del self._undecided[name]

    def send_planned(self, planned: Plan, *, is_full: bool) -> None:
        """Send a step's statuses. A function without a decision keeps its last status."""
        undecided = {name: self._statuses[name] for name in planned.failed if name in self._statuses}
        statuses = undecided | planned.statuses
        if is_full:
            self.send_all(statuses)
            return
        urgent = {
            name: status for name, status in statuses.items() if _urgent(status) != _urgent(self._statuses.get(name))
        }
        self._statuses.update(statuses)
        if urgent:
            self._send(urgent, is_full=False)

    def send_all(self, statuses: dict[str, FunctionStatus]) -> None:
        self._statuses = statuses
        self._send(statuses, is_full=True)

    def _send(self, statuses: dict[str, FunctionStatus], *, is_full: bool) -> None:
        self._sequence += is_full
        report = ControllerReport(
            controller=self._name,
            epoch=self._lease.epoch,
            sent_at=self._clock.time(),
            functions=tuple(statuses.values()),
            partial=not is_full,
            sequence=self._sequence,
        )
        refusal = ""
        try:
            for part in encode_parts(report, min(PART_BYTES, self._bus.server_info.get("max_payload", PART_BYTES))):
                try:
                    self._bus.publish(subjects.CONTROLLER_REPORT, part)
                except PayloadTooLarge as error:
                    refusal = str(error)
        except PlatformError as error:
            refusal = str(error)
        if is_full or refusal:
            self._on_refusal(refusal)

    def _on_refusal(self, refusal: str) -> None:
        """Log once, and once when a full report is published again."""
        if refusal and not self._refusal:
            log.warning(
                "a report, or a part of it, was not published; readers keep the last status: %s",
                refusal,
                extra={"controller": self._name},
            )
        elif self._refusal and not refusal:
            log.info("reports are published in full again", extra={"controller": self._name})
        self._refusal = refusal


def _urgent(status: FunctionStatus | None) -> object:
    """The fields that readers act on at once. The rest can wait for the report of the next second."""
    if status is None:
        return None
    waiting = None if status.waiting is None else status.waiting.reason
    revisions = [(each.revision, each.workers, each.start_error) for each in status.revisions]
    return status.workers, status.serving, waiting, status.start_error, status.next, revisions
