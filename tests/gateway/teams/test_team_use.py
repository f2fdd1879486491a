"""The resources that teams hold, from the reports of nodes and runners."""

from __future__ import annotations

import pytest

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType, Health
from gpufn_core.domain.team import Team, Teams
from gpufn_core.domain.worker import ParkedMemory, WorkerState
from gpufn_core.protocol.reports import NodeReport, ProcessReport, RunnerReport, WorkerReport
from gpufn_gateway.teams.team_use import held_by_teams, shares_of_teams


@pytest.fixture
def teams() -> Teams:
    teams = Teams()
    teams.put(Team(name="a", owns=("prod/a/*",), weight=3.0))
    teams.put(Team(name="b", owns=("prod/b/*",)))
    return teams


def process(worker: str, function: str, gpus: tuple[str, ...] = (), **fields: object) -> ProcessReport:
    share = DeviceShare("cpu", 1.0, 1, gpus)
    return ProcessReport(worker, function, 1, 1, 0.0, share=share, **fields)  # type: ignore[arg-type]


def node(*processes: ProcessReport, gpus: int = 0, sick: int = 0) -> NodeReport:
    healths = [Health.HEALTHY] * gpus + [Health.FAILED] * sick
    devices = [Device(f"g{number}", DeviceType.GPU, "L4", 1, health=health) for number, health in enumerate(healths)]
    return NodeReport("n", 0.0, (Device("cpu", DeviceType.CPU, "cpu", 1), *devices), processes=processes)


def test_parked_and_draining_workers_are_not_held_and_a_gang_is_one_worker(teams: Teams) -> None:
    runner = RunnerReport(
        "n",
        "r",
        0.0,
        tuple(
            WorkerReport(worker, "f", 1, state, 1)
            for worker, state in (("ready", WorkerState.READY), ("draining", WorkerState.DRAINING))
        ),
    )
    reported = node(
        process("ready", "prod/a/f", ("g0",)),
        process("starting", "prod/a/f"),
        process("draining", "prod/a/f", ("g1",)),
        process("parked", "prod/a/f", ("g2",), parked=ParkedMemory(1)),
        process("rank-0", "prod/b/f", ("g3", "g4"), rank=0),
        process("rank-1", "prod/b/f", ("g5", "g6"), rank=1),
        process("free", "f", ("g7",)),
    )
    assert held_by_teams([reported], [runner], teams) == {"a": (2, 1.0), "b": (1, 4.0), "": (1, 1.0)}


def test_a_share_is_by_weight_of_the_healthy_gpus(teams: Teams) -> None:
    nodes = [node(gpus=3), node(gpus=2, sick=1)]
    assert shares_of_teams(nodes, ["prod/a/f"], teams) == {"a": 3.75, "b": 1.25}
    assert shares_of_teams(nodes, ["prod/a/f", "free"], teams) == {"a": 3.0, "b": 1.0, "": 1.0}
