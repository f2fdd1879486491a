"""Index of this runner's attempts by invocation, for cancels and lookups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpufn_runtime.runner.core.attempt import Attempt


class Attempts(Mapping[str, Attempt]):
    """Holds the newest attempt of each invocation: a queued one may begin while a fast-path one is being cancelled."""

    def __init__(self) -> None:
        self._newest: dict[str, Attempt] = {}

    def add(self, attempt: Attempt) -> None:
        """Add the attempt to the index. May be repeated."""
        self._newest[attempt.message.id] = attempt

    def discard(self, attempt: Attempt) -> None:
        """Remove the attempt from the index, but no other attempt of its invocation."""
        if self._newest.get(attempt.message.id) is attempt:
            del self._newest[attempt.message.id]

    def __getitem__(self, invocation: str) -> Attempt:
        return self._newest[invocation]

    def __iter__(self) -> Iterator[str]:
        return iter(self._newest)

    def __len__(self) -> int:
        return len(self._newest)
