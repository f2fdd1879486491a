"""Options of a call from the request headers: timeout, deadline, priority and trace. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from gpufn_core.errors import DeadlinePassed, InvalidInput
from gpufn_core.protocol.limits import LONGEST_TIMEOUT_S
from gpufn_core.spec.priority import Priority, priority_of

MAX_STATE_BYTES = 512  # of a tracestate
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MEMBER = re.compile(rb"[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")


class CallOptions(NamedTuple):
    """The options that the client sent, None or empty if it did not. `deadline` is in unix seconds. `trace` is its
    traceparent, with its tracestate after a space.

    >>> parse_call_options({b"x-gpufn-timeout": b"2.5", b"x-gpufn-priority": b"low"}, now=1000.0)
    CallOptions(timeout_s=2.5, deadline=None, priority=<Priority.LOW: 'low'>, trace='')
    """

    timeout_s: float | None
    deadline: float | None
    priority: Priority | None
    trace: str

    def remaining_s(self, now: float) -> float | None:
        """Return the seconds until the timeout or the deadline, whichever is earlier. Negative if it has passed.

        The timeout starts when the body has arrived. The deadline does not move, however long the body takes.

        >>> CallOptions(30.0, 1010.0, None, "").remaining_s(now=1004.0)
        6.0
        """
        if self.deadline is None:
            return self.timeout_s
        remaining_s = self.deadline - now
        return remaining_s if self.timeout_s is None else min(self.timeout_s, remaining_s)


_NO_OPTIONS: Final = CallOptions(None, None, None, "")


def parse_call_options(headers: Mapping[bytes, bytes], now: float) -> CallOptions:
    """Parse the options. Raises InvalidInput, DeadlinePassed."""
    timeout, deadline = headers.get(b"x-gpufn-timeout"), headers.get(b"x-gpufn-deadline")
    priority, traceparent = headers.get(b"x-gpufn-priority"), headers.get(b"traceparent")
    if timeout is None and deadline is None and priority is None and traceparent is None:
        return _NO_OPTIONS
    return CallOptions(
        _timeout_s(timeout),
        _deadline(deadline, now),
        None if priority is None else priority_of(priority.decode("latin-1"), "X-Gpufn-Priority"),
        "" if traceparent is None else _trace(traceparent, headers.get(b"tracestate")),
    )


def _trace(traceparent: bytes, tracestate: bytes | None) -> str:
    """Return the traceparent, with the tracestate after a space. Both are ignored if they are malformed, as W3C Trace
    Context demands. Members of the state beyond its length are cut off."""
    if not _TRACEPARENT.fullmatch(traceparent):
        return ""
    if not tracestate:
        return traceparent.decode()
    if len(tracestate) > MAX_STATE_BYTES:
        tracestate = tracestate[: MAX_STATE_BYTES + 1].rpartition(b",")[0]
    members = [member for each in tracestate.split(b",") if (member := each.strip(b" \t"))]
    if not members or not all(map(_MEMBER.fullmatch, members)):
        return traceparent.decode()
    return f"{traceparent.decode()} {b','.join(members).decode()}"


def _number(header: bytes) -> float:
    try:
        return float(header)
    except ValueError:
        return math.nan


def _timeout_s(header: bytes | None) -> float | None:
    if header is None:
        return None
    seconds = _number(header)
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise InvalidInput(
            "X-Gpufn-Timeout must be a number of seconds above 0 and at most 7 days", field="X-Gpufn-Timeout"
        )
    return seconds


def _deadline(header: bytes | None, now: float) -> float | None:
    if header is None:
        return None
    deadline = _number(header)
    if not deadline - now <= LONGEST_TIMEOUT_S:
        raise InvalidInput(
            "X-Gpufn-Deadline must be in unix seconds and at most 7 days ahead", field="X-Gpufn-Deadline"
        )
    if deadline <= now:
        raise DeadlinePassed(f"the deadline of this call passed {now - deadline:.1f} s ago")
    return deadline
