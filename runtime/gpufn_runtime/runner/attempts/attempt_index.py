"""Index of this runner's attempts by invocation, for cancels and lookups."""

from __future__ import annotations

from gpufn_runtime.runner.core.attempt import Attempt


class Attempts(dict[str, Attempt]):
    """Holds the newest attempt of each invocation: a queued attempt may begin while a fast-path attempt is being
    cancelled."""

    def add(self, attempt: Attempt) -> None:
        """Add the attempt to the index. May be repeated."""
        self[attempt.message.id] = attempt

    def discard(self, attempt: Attempt) -> None:
        """Remove the attempt from the index, but no other attempt of its invocation."""
        if self.get(attempt.message.id) is attempt:
            del self[attempt.message.id]
