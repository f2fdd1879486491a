"""The WebSockets and streams of inference that each sender of requests has open. Pure.

A sender is a team, or a key or a user without a team (`Access.sender_of`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from gpufn_core.errors import RateLimited

_RETRY_S = 5.0


class OpenStreams:
    """Each sender has at most `limit`.

    >>> streams = OpenStreams(1)
    >>> with streams.open("team/a"), streams.open("team/b"):
    ...     streams.count("team/a")
    1
    >>> streams.count("team/a")
    0
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._counts: Counter[str] = Counter()

    def count(self, sender: str) -> int:
        return self._counts[sender]

    @contextlib.contextmanager
    def open(self, sender: str) -> Iterator[None]:
        """Context in which a stream is open. Raises RateLimited."""
        if self._counts[sender] >= self.limit:
            raise RateLimited(
                f"This key or its team has {self.limit:,} WebSockets and streams open, as many as GPUFN_MAX_STREAMS "
                "allows: close some.",
                retry_after_s=_RETRY_S,
            )
        self._counts[sender] += 1
        try:
            yield
        finally:
            self._counts[sender] -= 1
            if not self._counts[sender]:
                del self._counts[sender]
