"""What a controller says: a ControllerReport in full each second, and at once of what others act upon; its log.

A report is published in parts of a bounded size. A part that the bus refuses is logged once, and the others are
published: readers keep the last status of the functions in it.
"""

from __future__ import annotations

import logging

from gpufn_core.errors import PayloadTooLarge, PlatformError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.report_parts import PART_BYTES, encode_parts
from gpufn_core.protocol.reports import ControllerReport, FunctionStatus
from gpufn_gateway.controller.decide.actions import Plan
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.leader_lease import Lease
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)


class Reports:
    def __init__(self, bus: Bus, *, name: str, lease: Lease, clock: Clock) -> None:
        self._bus = bus
        self._name = name
        self._lease = lease
        self._clock = clock
        self._statuses: dict[str, FunctionStatus] = {}
        self._undecided: dict[str, str] = {}  # functions that the last step over them failed for, and why
        self._trouble = ""
        self._refusal = ""  # of a part of the last full report
        self._sequence = 0

    def forget(self, function: str) -> None:
        self._statuses.pop(function, None)
        self._undecided.pop(function, None)

    def complain(self, trouble: str) -> None:
        """Once per trouble, and once when it is over."""
        if trouble and not self._trouble:
            log.warning("the controller keeps its last decisions: %s", trouble, extra={"controller": self._name})
        elif self._trouble and not trouble:
            log.info("the controller goes on", extra={"controller": self._name})
        self._trouble = trouble

    def complain_of_failed(self, planned: Plan) -> None:
        """Once per function and trouble."""
        for name, error in planned.failed.items():
            if self._undecided.get(name) != repr(error):
                self._undecided[name] = repr(error)
                log.error("its last decision stands: %r", error, exc_info=error, extra={"function": name})
        for name in self._undecided.keys() & planned.statuses.keys():
            del self._undecided[name]

    def send_planned(self, planned: Plan, *, is_full: bool) -> None:
        """A function that nothing was decided for stays as it was told."""
        kept = {name: self._statuses[name] for name in planned.failed if name in self._statuses}
        statuses = kept | planned.statuses
        if is_full:
            self.send_all(statuses)
            return
        told = {name: status for name, status in statuses.items() if _gist(status) != _gist(self._statuses.get(name))}
        self._statuses.update(statuses)
        if told:
            self._send(told, is_full=False)

    def send_all(self, statuses: dict[str, FunctionStatus]) -> None:
        self._statuses = statuses
        self._send(statuses, is_full=True)

    def _send(self, told: dict[str, FunctionStatus], *, is_full: bool) -> None:
        self._sequence += is_full
        report = ControllerReport(
            controller=self._name,
            epoch=self._lease.epoch,
            sent_at=self._clock.time(),
            functions=tuple(told.values()),
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
        """Once, and once when a full report is published again."""
        if refusal and not self._refusal:
            log.warning(
                "a report, or a part of it, was not published; others keep what they last knew: %s",
                refusal,
                extra={"controller": self._name},
            )
        elif self._refusal and not refusal:
            log.info("reports are published in full again", extra={"controller": self._name})
        self._refusal = refusal


def _gist(status: FunctionStatus | None) -> object:
    """What others act upon at once; the rest can wait for the second to end."""
    if status is None:
        return None
    waiting = None if status.waiting is None else status.waiting.reason
    return status.workers, status.serving, waiting, status.start_error, status.next
