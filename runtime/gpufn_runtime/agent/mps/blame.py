"""Whose code may have brought a GPU down. Pure.

MPS does not say which client made its server fault. Who was there at each of a GPU's last `INCIDENTS` faults is
quarantined: it starts no more on this node's shared GPUs. Several that were always there together cannot be told apart,
and are quarantined together. A new revision starts with nothing against it.

A call whose GPU fails under it runs again, so one that makes GPUs fail is there at several faults, and always with the
same neighbours: it takes one fault more than that before anybody is kept out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gpufn_core.domain.invocation import DELIVERIES_ON_FAILED_GPUS
from gpufn_core.domain.revision import RevisionKey

INCIDENTS = DELIVERIES_ON_FAILED_GPUS + 1
FORGOTTEN_S = 3600.0


class Suspects:
    """
    >>> suspects = Suspects()
    >>> for now, tenants in enumerate([("f", "g"), ("f", "h"), ("f", "g"), ("f",)]):
    ...     suspects.record("GPU-1", [(name, 1) for name in tenants], now)
    >>> suspects.quarantined
    {('f', 1)}
    """

    def __init__(self) -> None:
        self.quarantined: set[RevisionKey] = set()
        self._incidents: dict[str, deque[tuple[float, frozenset[RevisionKey]]]] = {}

    def record(self, gpu: str, tenants: Iterable[RevisionKey], now: float) -> None:
        """A fault of `gpu` at `now`, in seconds."""
        incidents = self._incidents.setdefault(gpu, deque(maxlen=INCIDENTS))
        incidents.append((now, frozenset(tenants)))
        while now - incidents[0][0] > FORGOTTEN_S:
            incidents.popleft()
        if len(incidents) == INCIDENTS:
            self.quarantined |= frozenset.intersection(*(there for _, there in incidents))
