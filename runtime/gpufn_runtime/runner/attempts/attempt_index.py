"""The attempts that this runner has, by invocation: who cancels a call, or asks where it is, finds it here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpufn_runtime.runner.attempts.attempt import Attempt


class Attempts(Mapping[str, Attempt]):
    """Of each invocation the newest: one from the queue may begin while the one from the lane is being cancelled."""

    def __init__(self) -> None:
        self._newest: dict[str, Attempt] = {}

    def add(self, attempt: Attempt) -> None:
        """From now on it is found. Again is fine."""
        self._newest[attempt.message.id] = attempt

    def discard(self, attempt: Attempt) -> None:
        """It is not found any more; another one of its invocation still is."""
        if self._newest.get(attempt.message.id) is attempt:
            del self._newest[attempt.message.id]

    def __getitem__(self, invocation: str) -> Attempt:
        return self._newest[invocation]

    def __iter__(self) -> Iterator[str]:
        return iter(self._newest)

    def __len__(self) -> int:
        return len(self._newest)
