"""What is wrong now, and why: the first thing that the overview shows. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from gpufn_core.domain.devices.device import Health
from gpufn_core.protocol.reports import FunctionStatus, NodeReport, WaitReason
from gpufn_gateway.console.live.rates import Rates

_MAX_CLOCK_SKEW_S = 1.0
_MANY_ERRORS = 0.05  # of the attempts
_FEW_ATTEMPTS = 5  # of fewer, a single error is no finding, but the failure of half of them is
_MOST_ERRORS = 0.5
# Calls that wait for one of these need a person. The others end by themselves.
_BLOCKED = frozenset({WaitReason.NO_CAPACITY, WaitReason.CRASH_LOOPING, WaitReason.LIMIT, WaitReason.STORE})


class Severity(enum.StrEnum):
    CRITICAL = "critical"  # calls do not run
    WARNING = "warning"


class SubjectKind(enum.StrEnum):
    PLATFORM = "platform"
    FUNCTION = "function"
    NODE = "node"


class Finding(msgspec.Struct, frozen=True):
    """Something that a person should look at. `code` names its kind, and `text` is the reason."""

    severity: Severity
    kind: SubjectKind
    subject: str
    code: str
    title: str
    text: str = ""


def of_function(status: FunctionStatus, rates: Rates) -> list[Finding]:
    """Return the findings about a function."""
    if not status.queued and status.start_error is None and status.next is None and not rates.errors_per_s:
        return []  # there are thousands of functions, and few findings
    found: list[Finding] = []

    def add(severity: Severity, code: str, title: str, text: str = "") -> None:
        found.append(Finding(severity, SubjectKind.FUNCTION, status.function, code, title, text))

    if (error := status.start_error) is not None:
        add(Severity.CRITICAL, error.code, "its workers fail to start", error.message)
    elif status.queued and status.waiting is not None and status.waiting.reason in _BLOCKED:
        waiting = status.waiting
        title = f"{status.queued:,} {'call waits' if status.queued == 1 else 'calls wait'}"
        add(Severity.CRITICAL, waiting.reason.value, title, waiting.detail)
    if status.next is not None and (error := status.next.start_error) is not None:
        title = f"revision {status.next.revision} does not start; revision {status.serving} serves on"
        add(Severity.WARNING, error.code, title, error.message)
    if _has_many_errors(rates):
        failed, ended = _count(rates.errors_per_s, rates), _count(rates.calls_per_s, rates)
        title = f"{100 * (rates.error_share or 0):.0f} % of its attempts failed in the last minute"
        add(Severity.WARNING, "errors", title, f"{failed:,} of {ended:,}")
    return found


def _has_many_errors(rates: Rates) -> bool:
    share = rates.error_share or 0.0
    if _count(rates.calls_per_s, rates) >= _FEW_ATTEMPTS:
        return share >= _MANY_ERRORS
    return share >= _MOST_ERRORS and _count(rates.errors_per_s, rates) > 1


def _count(per_s: float, rates: Rates) -> int:
    return round(per_s * rates.seconds)


def of_node(report: NodeReport) -> list[Finding]:
    """Return the findings about a node."""
    found: list[Finding] = []

    def add(severity: Severity, code: str, title: str, text: str = "") -> None:
        found.append(Finding(severity, SubjectKind.NODE, report.node, code, title, text))

    for device in report.devices:
        if device.health is not Health.HEALTHY:
            severity = Severity.CRITICAL if device.health is Health.FAILED else Severity.WARNING
            add(severity, "device", f"{device.kind} is {device.health}", device.health_reason)
    if report.clock_skew_s is not None and abs(report.clock_skew_s) > _MAX_CLOCK_SKEW_S:
        title = f"its clock differs by {report.clock_skew_s:+.1f} s from that of the bus"
        add(Severity.WARNING, "clock", title, "Synchronize the clocks of the hosts, for example by chrony.")
    return found


def of_platform(why_not_ready: str | None) -> list[Finding]:
    """Return the finding that no call can be served, if that is so."""
    if why_not_ready is None:
        return []
    title = "the platform is not ready"
    return [Finding(Severity.CRITICAL, SubjectKind.PLATFORM, "", "not_ready", title, why_not_ready)]


def sorted_by_severity(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda each: (each.severity is not Severity.CRITICAL, each.kind, each.subject))
