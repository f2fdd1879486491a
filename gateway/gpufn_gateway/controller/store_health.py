"""Whether the bus stores what the controller decides, by how its last tries went. Pure."""

from __future__ import annotations

import math

TOLD_FOR_S = 10.0  # the next try begins within a second, and may take five
WHY = "the message bus does not store what is decided: its disk may be full"


class Store:
    """Times are monotonic seconds. What nobody tries again, for no call wants it, is not known for long."""

    def __init__(self) -> None:
        self._failed_at = -math.inf

    def failed(self, now: float) -> None:
        self._failed_at = now

    def worked(self) -> None:
        self._failed_at = -math.inf

    def is_stuck(self, now: float) -> bool:
        return now - self._failed_at <= TOLD_FOR_S
