"""Callers that each call one function repeatedly, and their statistics.

Uses the standard library's HTTP client: it takes a tenth of httpx's time per call, and eight threads share one
interpreter.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

_TIMEOUT_S = 60.0


class CallStats(msgspec.Struct, frozen=True):
    """Calls of one or several callers in `seconds`: the duration of each call, and the failures."""

    seconds: float
    calls_s: Sequence[float]
    failures: Sequence[str] = ()

    @property
    def per_second(self) -> float:
        return len(self.calls_s) / self.seconds

    def quantile_ms(self, share: float) -> float | None:
        """Return a quantile of the durations; None without calls.

        >>> CallStats(1.0, [0.003, 0.001, 0.002]).quantile_ms(0.5)
        2.0
        """
        if not self.calls_s:
            return None
        return sorted(self.calls_s)[min(int(len(self.calls_s) * share), len(self.calls_s) - 1)] * 1e3

    @classmethod
    def together(cls, stats: Sequence[Self], seconds: float) -> Self:
        return cls(
            seconds, [call for each in stats for call in each.calls_s], [why for each in stats for why in each.failures]
        )


class Caller:
    """A client that calls one function over one connection."""

    def __init__(self, url: str, function: str, arguments: dict[str, Any]) -> None:
        self._address = urlsplit(url).netloc
        self._path = f"/v1/functions/{function}/invoke"
        self._body = json.dumps(arguments)
        self._connection: http.client.HTTPConnection | None = None

    def call(self) -> str:
        """Make a call. Return why it failed, or ""."""
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
            self._connection.request("POST", self._path, self._body, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return repr(error)
        return "" if answer.status == 200 else body.decode(errors="replace")[:300]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def once(self) -> CallStats:
        started = time.perf_counter()
        why = self.call()
        taken = time.perf_counter() - started
        return CallStats(taken, [], [why]) if why else CallStats(taken, [taken])

    def for_seconds(self, seconds: float, stop: threading.Event | None = None) -> CallStats:
        """Call repeatedly until the time is over or `stop` is set, then close the connection."""
        stats: list[CallStats] = []
        started = time.perf_counter()
        while time.perf_counter() - started < seconds and not (stop and stop.is_set()):
            stats.append(self.once())
            if stats[-1].failures:
                time.sleep(0.01)  # do not hammer a platform that refuses at once
        self.close()
        return CallStats.together(stats, time.perf_counter() - started)


def all_at_once(callers: Sequence[Caller], seconds: float) -> list[CallStats]:
    """Return the statistics of each caller while all of them called."""
    stats: dict[int, CallStats] = {}

    def work(index: int) -> None:
        stats[index] = callers[index].for_seconds(seconds)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(callers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [stats[index] for index in range(len(callers))]
