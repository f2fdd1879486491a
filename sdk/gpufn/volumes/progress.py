"""Progress of a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Progress:
    """Counts the bytes of a copy. `report` receives the bytes that are done, and all. Thread-safe."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._done = self._total = 0
        self.sent_bytes = self.sent_files = 0  # without files that existed already

    def begin(self, total: int) -> None:
        self._total = total
        self._report(0, total)

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._report(self._done, self._total)

    def count_sent(self, size: int) -> None:
        with self._lock:
            self.sent_bytes += size
            self.sent_files += 1


SILENT = Progress(lambda done, total: None)
