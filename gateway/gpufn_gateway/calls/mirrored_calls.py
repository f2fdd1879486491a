"""The comparisons of mirrored calls of all gateways since this one started: counts, and the last differences. They are
in memory only."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

import msgspec

from gpufn_core.domain.durations import bucket_of, percentile
from gpufn_core.domain.traffic import Comparison, Difference, MirroredCall
from gpufn_core.protocol import subjects
from gpufn_gateway.functions.registry import Registry
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.typed_handler import decoded

MAX_DIFFERENCES: Final = 100  # per split

_call = msgspec.msgpack.Decoder(MirroredCall)


class MirrorCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Compared calls, and the median run times of the calls and of their copies."""

    revision: int
    equal: int = 0
    different: int = 0
    failed: int = 0
    skipped: int = 0
    p50_s: float | None = None
    copy_p50_s: float | None = None


class _Split:
    def __init__(self, first: MirroredCall) -> None:
        self.split_at = first.split_at
        self.revision = first.revision
        self.counts: Counter[Comparison] = Counter()
        self.durations: Counter[int] = Counter()
        self.copy_durations: Counter[int] = Counter()
        self.differences: deque[Difference] = deque(maxlen=MAX_DIFFERENCES)


class MirroredCalls:
    def __init__(self, registry: Registry) -> None:
        self._splits: dict[str, _Split] = {}
        registry.on_deleted.append(self._forget)

    def start(self, bus: Bus) -> None:
        bus.subscribe(subjects.MIRRORED_CALLS, decoded(_call, self.add))

    def _forget(self, function: str) -> None:
        self._splits.pop(function, None)

    def add(self, call: MirroredCall) -> None:
        known = self._splits.get(call.function)
        if known is None or known.split_at < call.split_at:
            known = self._splits[call.function] = _Split(call)
        if known.split_at != call.split_at:
            return
        known.counts[call.comparison] += 1
        if call.comparison in (Comparison.EQUAL, Comparison.DIFFERENT):
            known.durations[bucket_of(call.took_s)] += 1
            known.copy_durations[bucket_of(call.copy_took_s)] += 1
        if call.difference is not None:
            known.differences.append(call.difference)

    def counts(self, function: str) -> MirrorCounts | None:
        """Return the counts of the last mirror of a function; None without a mirrored call."""
        known = self._splits.get(function)
        if known is None:
            return None
        return MirrorCounts(
            revision=known.revision,
            **{comparison.value: known.counts[comparison] for comparison in Comparison},
            p50_s=percentile(known.durations, 50),
            copy_p50_s=percentile(known.copy_durations, 50),
        )

    def differences(self, function: str) -> list[Difference]:
        """Return the last differences, oldest first."""
        known = self._splits.get(function)
        return [] if known is None else list(known.differences)
