"""The skew of a node's wall clock: the node's time minus the NATS server's time, in seconds. None: unknown.

Deadlines and times in records are unix seconds of the host that wrote them.
"""

from __future__ import annotations

from typing import Final

# NTP keeps hosts within 0.1 s of each other, and a measurement is wrong by at most 0.5 s. A skew of two seconds is
# therefore a fault of the clock.
SKEWED_S: Final = 2.0
_LONGEST_ROUND_TRIP_S: Final = 1.0  # the server's time lies within it, so half of it is the largest error
REMEDY: Final = "synchronize the clock with NTP (`timedatectl set-ntp true`, or chrony)"


def measure(sent_at: float, server_at: float, received_at: float) -> float | None:
    """Compute the skew from a request that the node sent and received at these times of its own clock.

    None for a slow reply, and for a clock that was set back in between.

    >>> measure(103.0, 100.25, 103.5)
    3.0
    """
    round_trip_s = received_at - sent_at
    if not 0 <= round_trip_s <= _LONGEST_ROUND_TRIP_S:
        return None
    return sent_at + round_trip_s / 2 - server_at


def is_skewed(skew_s: float | None) -> bool:
    return skew_s is not None and abs(skew_s) >= SKEWED_S


def describe(skew_s: float | None) -> str:
    """
    >>> describe(3.04), describe(-3600.0), describe(0.21), describe(None)
    ('3.0 s ahead of the message bus', '3600.0 s behind the message bus', '0.2 s ahead of the message bus', 'unknown')
    """
    if skew_s is None:
        return "unknown"
    return f"{abs(skew_s):.1f} s {'behind' if skew_s < 0 else 'ahead of'} the message bus"
