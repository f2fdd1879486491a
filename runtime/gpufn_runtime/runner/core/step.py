"""The event that the state machine handles now: its time, and the list of the actions that follow. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpufn_runtime.runner.core import actions
from gpufn_runtime.runner.core.attempt import Attempt
from gpufn_runtime.runner.core.events import Now

TOUCH_EVERY_S: Final = 2.0


class Step:
    """Shared by the parts of a state machine, which sets both fields for each event."""

    __slots__ = ("emit", "now")

    def __init__(self) -> None:
        self.now = Now(0.0, 0.0)
        self.emit: Callable[[actions.Action], None] = list[actions.Action]().append

    def touch(self, attempt: Attempt) -> None:
        """Extend the ack deadline of its delivery, unless that was done a moment ago."""
        if self.now.monotonic - attempt.touched_at >= TOUCH_EVERY_S:
            attempt.touched_at = self.now.monotonic
            self.emit(actions.Touch(attempt.delivery))
