"""How many calls are stored of each revision, as the streams were last read, and the doorbells since. Pure."""

from __future__ import annotations

from gpufn_core.domain.revision import RevisionKey

STALE_S = 5.0


class Depths:
    """Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self._stored: dict[RevisionKey, int] | None = None
        self._read_at = now
        self._rung: dict[str, float] = {}

    def read(self, stored: dict[RevisionKey, int] | None, asked_at: float, now: float) -> None:
        """Queued and running calls; None when they could not be read."""
        self._stored = stored
        self._read_at = now
        self._rung = {name: at for name, at in self._rung.items() if at > asked_at}

    def forget(self) -> None:
        self._stored = None

    def ring(self, function: str, now: float) -> None:
        """A call was queued: at least one waits, whatever was read last."""
        self._rung[function] = now

    def has_rung(self, function: str) -> bool:
        """Whether a doorbell rang that the last reading does not cover."""
        return function in self._rung

    def of(self, key: RevisionKey, now: float) -> int | None:
        """None when unknown."""
        stored = self._fresh(now)
        return None if stored is None else stored.get(key, 0)

    def with_calls(self, now: float) -> set[RevisionKey] | None:
        """Revisions that have some; None when unknown."""
        stored = self._fresh(now)
        return None if stored is None else {key for key, count in stored.items() if count}

    def _fresh(self, now: float) -> dict[RevisionKey, int] | None:
        return None if now - self._read_at > STALE_S else self._stored
