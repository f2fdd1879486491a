"""The present use of teams: workers and GPUs from the reports of nodes and runners, calls and seconds from the counters
of their limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from gpufn_core.domain.devices.device import DeviceType, Health
from gpufn_core.domain.team import NO_TEAM, Team, Teams, TeamUse
from gpufn_core.domain.usage import Usage
from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol.reports import NodeReport, RunnerReport
from gpufn_gateway.auth.quota_sync import QuotaSync
from gpufn_gateway.auth.team_account import quota_id
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.teams.function_limit import functions_by_team
from gpufn_gateway.teams.storage import TeamStorage

_HOLDING: Final = (WorkerState.STARTING, WorkerState.READY, WorkerState.RESUMING)


class TeamUses:
    def __init__(self, registry: Registry, quotas: QuotaSync, storage: TeamStorage) -> None:
        self._registry = registry
        self._quotas = quotas
        self._storage = storage

    async def of(self, teams: Iterable[Team]) -> dict[str, TeamUse]:
        """Return the use of teams by name."""
        listed = list(teams)
        if not listed:
            return {}
        registry = self._registry
        nodes = registry.live_nodes()
        held = held_by_teams(nodes, registry.live_runners(), registry.teams)
        shares = shares_of_teams(nodes, registry.functions, registry.teams)
        usage, stored = await self._quotas.usage_today(), await self._storage.used_by({team.name for team in listed})
        queued = await asyncio.gather(*(self._quotas.count_queued(quota_id(team.name)) for team in listed))
        functions, uses = functions_by_team(registry), {}
        for team, calls in zip(listed, queued, strict=True):
            (workers, gpus), today = held.get(team.name, (0, 0.0)), usage.get(quota_id(team.name), Usage())
            uses[team.name] = TeamUse(
                workers=workers,
                gpus=gpus,
                borrowed_gpus=max(0.0, gpus - shares[team.name]),
                queued=calls,
                run_s=today.run_s,
                gpu_s=today.gpu_s,
                stored_bytes=stored[team.name],
                functions=functions[team.name],
            )
        return uses


def held_by_teams(
    nodes: Iterable[NodeReport], runners: Iterable[RunnerReport], teams: Teams
) -> dict[str, tuple[int, float]]:
    """Return the workers and the GPUs that each team holds. As in its limits, parked and draining workers do not count,
    and a gang is one worker."""
    states = {worker.worker: worker.state for runner in runners for worker in runner.workers}
    held: dict[str, tuple[int, float]] = {}
    for process in (process for node in nodes for process in node.processes):
        is_parked = process.parked is not None
        if is_parked or states.get(process.worker, WorkerState.STARTING) not in _HOLDING:
            continue
        team = teams.name_of(process.function)
        workers, gpus = held.get(team, (0, 0.0))
        charged = 0.0 if process.share is None else process.share.gpus_charged
        held[team] = workers + (not process.rank), gpus + charged
    return held


def shares_of_teams(nodes: Iterable[NodeReport], functions: Iterable[str], teams: Teams) -> dict[str, float]:
    """Return the part of the healthy GPUs that belongs to each team by its weight. Functions without a team count as
    one more team of weight 1."""
    gpus = sum(
        device.type is DeviceType.GPU and device.health is Health.HEALTHY for node in nodes for device in node.devices
    )
    weights = {team.name: team.weight for team in teams.all()}
    if any(teams.name_of(function) == NO_TEAM for function in functions):
        weights[NO_TEAM] = 1.0
    return {name: gpus * weight / sum(weights.values()) for name, weight in weights.items()}
