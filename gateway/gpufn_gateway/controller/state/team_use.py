"""Recent GPU seconds of each team, of which half are forgotten in an hour. Pure.

Fair share by usage, as in Slurm's multifactor priority: a team with little usage goes first. So unused share is not
lost to a team that needs it in bursts. A new leader starts at zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpufn_core.domain.devices.device import DeviceShare

HALF_LIFE_S: Final = 3600.0
CORE_IN_GPUS: Final = 0.01  # a worker without a GPU counts as this part of one for each of its cores
GRANT_S: Final = 60.0  # a worker that is granted counts as if it had run this long, until its usage is observed


def cost_of(share: DeviceShare) -> float:
    """Return the GPUs that a worker's share counts as."""
    return share.gpus_charged or share.cores * CORE_IN_GPUS


class TeamUse:
    """
    >>> use = TeamUse()
    >>> use.observe({"a": 2.0}, now=0.0)
    >>> use.observe({"a": 2.0, "b": 1.0}, now=10.0)
    >>> round(use.gpu_s("a")), round(use.gpu_s("b"))
    (20, 10)
    >>> use.observe({}, now=3610.0)
    >>> round(use.gpu_s("a"))
    10
    """

    def __init__(self) -> None:
        self._gpu_s: dict[str, float] = {}
        self._at: float | None = None

    def observe(self, held: Mapping[str, float], now: float) -> None:
        """Add the time since the last observation, at the GPUs that each team holds now."""
        passed_s = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        self._gpu_s = {team: used * kept for team, used in self._gpu_s.items()}
        for team, gpus in held.items():
            self._gpu_s[team] = self._gpu_s.get(team, 0.0) + gpus * passed_s

    def gpu_s(self, team: str) -> float:
        return self._gpu_s.get(team, 0.0)
