"""Attribution of GPU faults to functions. Pure.

MPS does not report which client caused a fault. A revision that was present at each of a GPU's last `INCIDENTS` faults
is quarantined: it no longer starts on this node's shared GPUs. Revisions that were always present together cannot be
distinguished and are quarantined together. A new revision starts with a clean record.

A call whose GPU fails is retried, so one bad call causes several faults, always with the same neighbors. `INCIDENTS` is
one more than these retries can cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gpufn_core.domain.invocation import DELIVERIES_ON_FAILED_GPUS
from gpufn_core.domain.revision import RevisionKey

INCIDENTS = DELIVERIES_ON_FAILED_GPUS + 1
FORGOTTEN_S = 3600.0


class Suspects:
    """Record of faults and quarantined revisions.

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
        """Record a fault of `gpu` at `now`, in seconds."""
        incidents = self._incidents.setdefault(gpu, deque(maxlen=INCIDENTS))
        incidents.append((now, frozenset(tenants)))
        while now - incidents[0][0] > FORGOTTEN_S:
            incidents.popleft()
        if len(incidents) == INCIDENTS:
            self.quarantined |= frozenset.intersection(*(revisions for _, revisions in incidents))
