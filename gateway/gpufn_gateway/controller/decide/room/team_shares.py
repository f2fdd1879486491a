"""Limits and order between teams within one step: which team comes next, and which team has reached its limit. Pure.

Without teams, all functions belong to one team without limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from gpufn_core.domain.devices.device import DeviceShare, Share
from gpufn_core.domain.team import NO_TEAM
from gpufn_core.domain.worker import WorkerState
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.actions import Need
from gpufn_gateway.controller.state.team_use import GRANT_S, cost_of
from gpufn_gateway.controller.state.views import WorkerView
from gpufn_gateway.controller.state.world import World

_HOLDING: Final = (WorkerState.STARTING, WorkerState.READY, WorkerState.RESUMING)
_ROUNDING: Final = 1e-9  # four quarters of a GPU are one


class TeamShares:
    """Workers and GPUs that the teams hold, with the grants of this step. Parked and draining workers do not count."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.has_teams = bool(world.teams)
        self._workers: dict[str, int] = {}
        self._gpus: dict[str, float] = {}
        self._costs: dict[str, float] = {}
        self._granted_s: dict[str, float] = {}  # GPU seconds
        for worker in world.workers.values() if self.has_teams else ():
            if worker.state in _HOLDING:
                self._add(self.team_of(worker.key[0]), [worker.assignment.share], is_worker=not worker.assignment.rank)

    @property
    def costs(self) -> dict[str, float]:
        """The GPUs that each team holds, as `TeamUse` counts them."""
        return self._costs

    def team_of(self, function: str) -> str:
        if not self.has_teams:
            return NO_TEAM
        return self._world.teams.name_of(function)

    def load(self, team: str) -> float:
        """Return the recent GPU seconds of a team in proportion to its weight. The lowest goes first."""
        return (self._world.team_use.gpu_s(team) + self._granted_s.get(team, 0.0)) / self._weight(team)

    def _weight(self, team: str) -> float:
        record = self._world.teams.get(team)
        return 1.0 if record is None else record.weight

    def refusal(self, need: Need) -> str:
        """Return why its team may hold no further worker; "" if it may."""
        team = self._world.teams.get(self.team_of(need.key[0]))
        if team is None:
            return ""
        workers, gpus, limits = self._workers.get(team.name, 0), self._gpus.get(team.name, 0.0), team.limits
        if limits.workers is not None and workers >= limits.workers:
            return f"the team {team.name} has {workers:,} of its {limits.workers:,} workers"
        wanted = _gpus_at_least(need.requirements.resources)
        if limits.gpus is not None and wanted and gpus + wanted > limits.gpus + _ROUNDING:
            return f"the team {team.name} holds {gpus:g} of its {limits.gpus:g} GPUs"
        return ""

    def is_borrowed(self, worker: WorkerView, need: Need) -> bool:
        """Return whether the worker's team holds more than its share compared with the team of `need`. This must also
        hold after the worker moved to `need`, so that no worker goes back and forth."""
        mine, other = self.team_of(need.key[0]), self.team_of(worker.key[0])
        if mine == other:
            return False
        taken = sum(cost_of(process.assignment.share) for process in self._world.ranks(worker))
        return self._part(other, -taken) >= self._part(mine, taken) - _ROUNDING

    def _part(self, team: str, change: float) -> float:
        return (self._costs.get(team, 0.0) + change) / self._weight(team)

    def grant(self, need: Need, shares: Sequence[DeviceShare]) -> None:
        """Count a worker that this step starts or resumes: the shares of its processes."""
        if not self.has_teams:
            return
        team = self.team_of(need.key[0])
        self._add(team, shares, is_worker=True)
        self._granted_s[team] = self._granted_s.get(team, 0.0) + GRANT_S * sum(map(cost_of, shares))

    def _add(self, team: str, shares: Sequence[DeviceShare], *, is_worker: bool) -> None:
        self._workers[team] = self._workers.get(team, 0) + is_worker
        self._gpus[team] = self._gpus.get(team, 0.0) + sum(share.gpus_charged for share in shares)
        self._costs[team] = self._costs.get(team, 0.0) + sum(map(cost_of, shares))


class Rounds:
    """The order of starts: the team with the least load first, and within a team one worker per function and round. So
    no function gets its tenth worker before another gets its first. `needs` are in order."""

    def __init__(self, needs: Iterable[Need], shares: TeamShares) -> None:
        self._shares = shares
        self._rank: dict[int, int] = {}  # by id of the need
        self._now: dict[str, deque[Need]] = {}  # by team
        self._later: dict[str, deque[Need]] = {}
        if not shares.has_teams:
            self._now = {NO_TEAM: waiting} if (waiting := deque(needs)) else {}
            return
        for rank, need in enumerate(needs):
            self._rank[id(need)] = rank
            self._now.setdefault(shares.team_of(need.key[0]), deque()).append(need)

    def next(self) -> Need | None:
        """Return the next need, or None if there are no more."""
        if not self._now:
            return None
        team = next(iter(self._now)) if len(self._now) == 1 else min(self._now, key=self._order)
        waiting = self._now[team]
        need = waiting.popleft()
        if not waiting:
            del self._now[team]
            if team in self._later:
                self._now[team] = self._later.pop(team)
        return need

    def _order(self, team: str) -> tuple[float, int]:
        return self._shares.load(team), self._rank[id(self._now[team][0])]

    def repeat(self, need: Need) -> None:
        """Put a need into the next round of its team: it wants another worker."""
        team = self._shares.team_of(need.key[0])
        rounds = self._later if team in self._now else self._now
        rounds.setdefault(team, deque()).append(need)


def _gpus_at_least(wants: Resources) -> float:
    """Return the GPUs that a worker holds, as far as they are known before it has a place."""
    if not wants.gpu:
        return 0.0
    if wants.share is Share.MPS:
        return (wants.sm_percent or 1) / 100
    return float(wants.gpu_count * wants.nodes)
