"""The stored calls of each revision, as last read from the streams, and the wakeups since then. Pure."""

from __future__ import annotations

from collections.abc import Collection

from gpufn_core.domain.revision import RevisionKey

STALE_S = 5.0


class Depths:
    """Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._stored: dict[RevisionKey, int] | None = None
        self._read_at = now
        self._wakeups: dict[str, dict[int | None, float]] = {}  # by function and revision, if it is known

    def read(self, stored: dict[RevisionKey, int] | None, sent_at: float, now: float) -> None:
        """Record the queued and running calls; None when they could not be read."""
        self._stored = stored
        self._read_at = now
        later = {
            name: {number: at for number, at in woken.items() if at > sent_at} for name, woken in self._wakeups.items()
        }
        self._wakeups = {name: woken for name, woken in later.items() if woken}

    def forget(self) -> None:
        self._stored = None

    def send_wakeup(self, function: str, now: float, revision: int | None = None) -> None:
        """Record that a call was queued: at least one waits, whatever was read last."""
        self._wakeups.setdefault(function, {})[revision] = now

    def has_wakeup(self, function: str) -> bool:
        """Return whether a wakeup arrived that the last reading does not cover."""
        return function in self._wakeups

    def woken(self, function: str) -> Collection[int | None]:
        """Return the revisions of such wakeups; None for a wakeup without a revision."""
        return self._wakeups.get(function, ())

    def of(self, key: RevisionKey, now: float) -> int | None:
        """Return the calls of a revision; None when unknown."""
        stored = self._fresh(now)
        return None if stored is None else stored.get(key, 0)

    def with_calls(self, now: float) -> set[RevisionKey] | None:
        """Return the revisions with calls; None when unknown."""
        stored = self._fresh(now)
        return None if stored is None else {key for key, count in stored.items() if count}

    def _fresh(self, now: float) -> dict[RevisionKey, int] | None:
        return None if now - self._read_at > STALE_S else self._stored
