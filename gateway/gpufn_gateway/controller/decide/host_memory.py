"""The memory that a node's host has for parked workers, and who goes when more is wanted. Pure.

Greedy-Dual-Size-Frequency: a parked worker's worth is what its resume saves, as often as it is used, per byte; plus the
worth of the last one that went. So what nobody has resumed for long is worth less and less beside what comes, without a
clock. The least goes.
"""

from __future__ import annotations

import msgspec


class Parked(msgspec.Struct, frozen=True):
    """What `resume` saves against a cold start: `saved_s`, `uses` times so far."""

    worker: str
    bytes: int
    uses: int = 1
    saved_s: float = 1.0


class HostMemory:
    """One node's.

    >>> memory = HostMemory()
    >>> memory.hold(Parked("rare", 100, uses=1))
    >>> memory.hold(Parked("often", 100, uses=9))
    >>> memory.victims(50)
    ['rare']
    """

    def __init__(self) -> None:
        self._held: dict[str, Parked] = {}
        self._promised: dict[str, int] = {}
        self._worth: dict[str, float] = {}
        self._floor = 0.0  # the worth of the last one that went

    def __repr__(self) -> str:
        return f"<HostMemory [{len(self._held)} workers, {self.used} bytes]>"

    @property
    def used(self) -> int:
        """And promised."""
        return sum(parked.bytes for parked in self._held.values()) + sum(self._promised.values())

    def promise(self, worker: str, expected_bytes: int) -> None:
        """It will be parked in a moment."""
        self._promised[worker] = expected_bytes

    def hold(self, parked: Parked) -> None:
        """It is parked. Told again, it is as large as told last and worth what it was."""
        self._promised.pop(parked.worker, None)
        known = self._held.get(parked.worker)
        if known is None or known.uses != parked.uses:
            self._worth[parked.worker] = self._floor + parked.uses * parked.saved_s / max(parked.bytes, 1)
        self._held[parked.worker] = parked

    def release(self, worker: str) -> None:
        """It has resumed, or ended. Absent is fine."""
        self._held.pop(worker, None)
        self._promised.pop(worker, None)
        self._worth.pop(worker, None)

    def evict(self, worker: str) -> None:
        """It ends for others: what comes from now on is compared with it. Its memory is held until it is released."""
        self._floor = max(self._floor, self._worth.get(worker, 0.0))

    def worth(self, worker: str) -> float:
        return self._worth.get(worker, 0.0)

    def victims(self, wanted_bytes: int) -> list[str]:
        """Who goes, so that `wanted_bytes` more are free; all that are parked when even that is too little."""
        found: list[str] = []
        for worker in sorted(self._held, key=lambda each: (self._worth[each], each)):
            if wanted_bytes <= 0:
                break
            found.append(worker)
            wanted_bytes -= self._held[worker].bytes
        return found
