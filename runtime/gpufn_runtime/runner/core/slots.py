"""Slots of a Worker, in which Attempts run: FREE ⇄ IN_USE → POISONED.

A slot is poisoned for good if its attempt cannot be proven to have ended.
"""

from __future__ import annotations


class SlotPool:
    """Counts the slots, because a runner need not distinguish them.

    >>> pool = SlotPool(2)
    >>> pool.take(); pool.poison(); pool
    <SlotPool [0 in use, 1 free, 1 poisoned]>
    """

    __slots__ = ("free", "in_use", "poisoned", "total")

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self.in_use = 0
        self.poisoned = 0

    def take(self) -> None:
        if self.free <= 0:
            raise AssertionError(f"no slot is free: {self!r}")
        self.free -= 1
        self.in_use += 1

    def release(self) -> None:
        if self.in_use <= 0:
            raise AssertionError(f"no slot is in use: {self!r}")
        self.in_use -= 1
        self.free += 1

    def poison(self) -> None:
        self.release()
        self.free -= 1
        self.poisoned += 1

    def __repr__(self) -> str:
        return f"<SlotPool [{self.in_use} in use, {self.free} free, {self.poisoned} poisoned]>"
