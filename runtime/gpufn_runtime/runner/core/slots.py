"""Slots of a Worker, in which Attempts run: FREE ⇄ IN_USE → POISONED.

A slot is poisoned for good if its attempt cannot be proven to have ended.
"""

from __future__ import annotations


class SlotPool:
    """Counts the slots, because a runner need not distinguish them. They are taken `uses` times in all; None: no limit.

    >>> pool = SlotPool(2)
    >>> pool.take(); pool.poison(); pool
    <SlotPool [0 in use, 1 free, 1 poisoned]>
    >>> once = SlotPool(2, uses=1)
    >>> once.take(); once.release(); once.free, once.is_spent
    (0, True)
    """

    __slots__ = ("_uses_left", "free", "in_use", "poisoned", "total")

    def __init__(self, total: int, uses: int | None = None) -> None:
        self.total = self.free = total if uses is None else min(total, uses)
        self._uses_left = None if uses is None else uses - self.free  # for slots that are not free now
        self.in_use = 0
        self.poisoned = 0

    @property
    def is_spent(self) -> bool:
        """Return whether no slot will be free again."""
        return self._uses_left == 0 and not self.free

    def take(self) -> None:
        if self.free <= 0:
            raise AssertionError(f"no slot is free: {self!r}")
        self.free -= 1
        self.in_use += 1

    def release(self) -> None:
        if self.in_use <= 0:
            raise AssertionError(f"no slot is in use: {self!r}")
        self.in_use -= 1
        if self._uses_left is None:
            self.free += 1
        elif self._uses_left:
            self._uses_left -= 1
            self.free += 1

    def poison(self) -> None:
        if self.in_use <= 0:
            raise AssertionError(f"no slot is in use: {self!r}")
        self.in_use -= 1
        self.poisoned += 1

    def __repr__(self) -> str:
        return f"<SlotPool [{self.in_use} in use, {self.free} free, {self.poisoned} poisoned]>"
