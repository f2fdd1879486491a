"""Host memory of one node for parked workers, and which of them to evict when more is wanted. Pure.

Greedy-Dual-Size-Frequency: the worth of a parked worker is the time that its resume saves, times its uses, per byte,
plus the worth of the last worker that was evicted. So the worth of a worker that is not resumed falls behind the worth
of new ones, without a clock. The worker with the least worth is evicted.
"""

from __future__ import annotations

import msgspec


class Parked(msgspec.Struct, frozen=True):
    """A parked worker. Each resume saves `saved_s` seconds against a cold start; there were `uses` so far."""

    worker: str
    bytes: int
    uses: int = 1
    saved_s: float = 1.0


class HostMemory:
    """The parked workers of one node.

    >>> memory = HostMemory()
    >>> memory.add(Parked("rare", 100, uses=1))
    >>> memory.add(Parked("often", 100, uses=9))
    >>> memory.victims(50)
    ['rare']
    """

    def __init__(self) -> None:
        self._held: dict[str, Parked] = {}
        self._reserved: dict[str, int] = {}
        self._worth: dict[str, float] = {}
        self._floor = 0.0  # the worth of the last evicted worker

    def __repr__(self) -> str:
        return f"<HostMemory [{len(self._held)} workers, {self.used} bytes]>"

    @property
    def used(self) -> int:
        """Bytes in use and reserved."""
        return sum(parked.bytes for parked in self._held.values()) + sum(self._reserved.values())

    def reserve(self, worker: str, expected_bytes: int) -> None:
        """Reserve memory for a worker that is being parked."""
        self._reserved[worker] = expected_bytes

    def add(self, parked: Parked) -> None:
        """Record a parked worker. Repeating it updates the size; the worth changes only with `uses`."""
        self._reserved.pop(parked.worker, None)
        known = self._held.get(parked.worker)
        if known is None or known.uses != parked.uses:
            self._worth[parked.worker] = self._floor + parked.uses * parked.saved_s / max(parked.bytes, 1)
        self._held[parked.worker] = parked

    def release(self, worker: str) -> None:
        """Release the memory of a worker that resumed or ended, if it has any."""
        self._held.pop(worker, None)
        self._reserved.pop(worker, None)
        self._worth.pop(worker, None)

    def evict(self, worker: str) -> None:
        """Raise the floor to the worth of a worker that makes room for others. Its memory is held until `release`."""
        self._floor = max(self._floor, self._worth.get(worker, 0.0))

    def worth(self, worker: str) -> float:
        return self._worth.get(worker, 0.0)

    def victims(self, wanted_bytes: int) -> list[str]:
        """Return the workers to evict so that `wanted_bytes` more are free; all workers if even that is too little."""
        victims: list[str] = []
        for worker in sorted(self._held, key=lambda each: (self._worth[each], each)):
            if wanted_bytes <= 0:
                break
            victims.append(worker)
            wanted_bytes -= self._held[worker].bytes
        return victims
