"""Health of the bus's storage, judged by the controller's last attempts to write. Pure."""

from __future__ import annotations

import math

STUCK_FOR_S = 10.0  # the next write starts within a second, and may take five
NOT_STORED = "the message bus does not store the controller's decisions: its disk may be full"


class Store:
    """Times are monotonic seconds. A failure expires, because no write may follow: the calls may have ended."""

    def __init__(self) -> None:
        self._failed_at = -math.inf

    def record_failure(self, now: float) -> None:
        self._failed_at = now

    def record_success(self) -> None:
        self._failed_at = -math.inf

    def is_stuck(self, now: float) -> bool:
        return now - self._failed_at <= STUCK_FOR_S
