"""The log lines of temporary functions, printed as they arrive, each with the name of its function."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from gpufn.cli.terminal.command import connect
from gpufn_core.errors import GpufnError

if TYPE_CHECKING:
    from gpufn.client.client import Client
    from gpufn_core.protocol.messages import LogLine

_TAIL: Final = 1000
_RETRY_S: Final = 0.5
_SETTLE_S: Final = 0.05  # the last lines of a call may reach the log a moment after its result
_SETTLE_READS: Final = 10


def drain(client: Client, followers: Collection[LogFollower]) -> None:
    """Show the lines that are stored by now, until two reads in a row find no new one."""
    quiet = 0
    for _ in range(_SETTLE_READS):
        new = sum([each.read(client) for each in followers])
        quiet = 0 if new else quiet + 1
        if quiet == 2:
            return
        time.sleep(_SETTLE_S)


class LogFollower:
    """Follows the log of one function from revision `first`: earlier lines belong to an earlier function of this name.
    `show` is called in this follower's thread."""

    def __init__(self, name: str, first: int, show: Callable[[LogLine], None]) -> None:
        self._name = name
        self._first = first
        self._show = show
        self._seen: list[LogLine] = []  # the last lines that were shown
        self._lock = threading.Lock()
        self._stop = threading.Event()
        threading.Thread(target=self._follow, name=f"logs of {name}", daemon=True).start()

    def read(self, client: Client) -> int:
        """Show the lines that are stored by now. Return their number."""
        with contextlib.suppress(GpufnError):
            return self._take(list(client.logs(self._name, tail=_TAIL)))
        return 0

    def stop(self) -> None:
        self._stop.set()

    def _follow(self) -> None:
        with connect() as client:
            while not self._stop.is_set():
                try:
                    for line in client.logs(self._name, tail=_TAIL, follow=True):
                        if self._stop.is_set():
                            return
                        self._take([line])
                except GpufnError:  # the gateway restarts, or the function is gone
                    self._stop.wait(_RETRY_S)

    def _take(self, lines: list[LogLine]) -> int:
        """Show the lines that were not shown before. Return their number."""
        with self._lock:
            known = set(self._seen)
            new = [line for line in lines if line.revision >= self._first and line not in known]
            for line in new:
                self._show(line)
            self._seen = [*self._seen, *new][-2 * _TAIL :]
            return len(new)
