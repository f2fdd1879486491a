"""The calls of the revisions of split functions, as runners report them: since the split was set, and lately. Pure.

Only split functions are counted here. A new controller starts at zero.
"""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from gpufn_core.domain.durations import growth, percentile
from gpufn_core.domain.revision import Function, RevisionKey
from gpufn_core.domain.traffic import MAX_WINDOW_S
from gpufn_core.protocol.reports import CallCounts, RevisionTraffic

_NOTHING = RevisionTraffic("", 0)


class _Counts(msgspec.Struct):
    calls: int = 0
    errors: int = 0
    durations: Counter[int] = msgspec.field(default_factory=Counter)

    def add(self, other: _Counts) -> None:
        self.calls += other.calls
        self.errors += other.errors
        self.durations.update(other.durations)

    def view(self) -> CallCounts:
        return CallCounts(self.calls, self.errors, percentile(self.durations, 50), percentile(self.durations, 99))


class _RevisionCalls:
    def __init__(self) -> None:
        self.total = _Counts()
        self.by_second: deque[tuple[int, _Counts]] = deque()

    def record(self, counts: _Counts, now: float) -> None:
        self.total.add(counts)
        if not self.by_second or self.by_second[-1][0] != int(now):
            self.by_second.append((int(now), _Counts()))
        self.by_second[-1][1].add(counts)
        while self.by_second[0][0] < now - MAX_WINDOW_S:
            self.by_second.popleft()

    def recent(self, now: float, window_s: float) -> _Counts:
        recent = _Counts()
        for second, counts in reversed(self.by_second):
            if second <= now - window_s:
                break
            recent.add(counts)
        return recent


class SplitCalls:
    def __init__(self) -> None:
        self._calls: dict[RevisionKey, _RevisionCalls] = {}
        self._splits: dict[str, tuple[float, float]] = {}  # function -> when its split was set, and its window

    def on_function(self, name: str, function: Function | None) -> None:
        """Start to count when a split is set, and stop when it ends."""
        split = None if function is None else function.traffic
        known = self._splits.get(name)
        if split is None:
            if known is not None:
                del self._splits[name]
                self._forget(name)
        elif known is None or known[0] != split.set_at:
            self._splits[name] = split.set_at, split.window_s
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._calls = {key: calls for key, calls in self._calls.items() if key[0] != name}

    def on_traffic(self, before: RevisionTraffic | None, traffic: RevisionTraffic, now: float) -> None:
        if traffic.function not in self._splits:
            return
        before = before or _NOTHING
        durations = growth(traffic.durations, before.durations)
        if durations:
            key = (traffic.function, traffic.revision)
            calls = self._calls.setdefault(key, _RevisionCalls())
            calls.record(_Counts(durations.total(), max(0, traffic.errors - before.errors), durations), now)

    def of(self, key: RevisionKey, now: float) -> tuple[CallCounts, CallCounts]:
        """Return the counts since the split was set, and in its window."""
        calls, split = self._calls.get(key), self._splits.get(key[0])
        if calls is None or split is None:
            return CallCounts(), CallCounts()
        return calls.total.view(), calls.recent(now, split[1]).view()
