"""Teams that compete for room: fair shares, borrowing, limits, isolation."""

from __future__ import annotations

import msgspec
import pytest

from gpufn_core.domain.devices.device import Share
from gpufn_core.domain.team import Team, TeamLimits
from gpufn_core.protocol.reports import WaitReason
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.actions import Drain
from tests.gateway.controller.simulation import GIB, Sim, cpu, gpu, node, revision

ONE_GPU = Resources(cpu=0.1, gpu=("any",))
MANY = ScalingPolicy(max_workers=8, idle_timeout_s=60)


def cluster(*teams: Team, gpus: int = 4, service_s: float = 1.0) -> Sim:
    sim = Sim(node("a", cpu(16, 64 * GIB), *(gpu(f"g{number}") for number in range(gpus))), service_s=service_s)
    for team in teams:
        sim.world.teams.put(team)
    return sim


def team(name: str, weight: float = 1.0, **limits: float) -> Team:
    return Team(name=name, owns=(f"*/{name}/*",), weight=weight, limits=msgspec.convert(limits, TeamLimits))


def deploy(sim: Sim, *names: str, resources: Resources = ONE_GPU, priority: Priority = Priority.NORMAL) -> None:
    for name in names:
        record = revision(name, scaling=MANY, resources=resources)
        spec = msgspec.structs.replace(record.spec, priority=priority)
        sim.deploy(msgspec.structs.replace(record, spec=spec))


def load(sim: Sim, *names: str) -> None:
    """Keep eight calls of each function in its queue."""
    for name in names:
        missing = 8 - len(sim.queues.get((name, 1), []))
        if missing > 0:
            sim.call(name, missing)


@pytest.mark.parametrize(("weights", "shares"), [((1.0, 1.0), (2, 2)), ((3.0, 1.0), (3, 1))])
def test_teams_that_compete_hold_gpus_by_weight(weights: tuple[float, float], shares: tuple[int, int]) -> None:
    sim = cluster(team("a", weights[0]), team("b", weights[1]))
    names = ("prod/a/x", "prod/a/y", "prod/b/z")
    deploy(sim, *names)
    sim.run(60, lambda sim: load(sim, *names))
    assert (sim.workers("prod/a/x") + sim.workers("prod/a/y"), sim.workers("prod/b/z")) == shares


def test_idle_capacity_is_borrowed_and_returned() -> None:
    sim = cluster(team("a"), team("b"))
    deploy(sim, "prod/a/x", "prod/b/z")
    sim.run(20, lambda sim: load(sim, "prod/a/x"))
    assert sim.workers("prod/a/x") == 4
    sim.run(30, lambda sim: load(sim, "prod/a/x", "prod/b/z"))
    assert (sim.workers("prod/a/x"), sim.workers("prod/b/z")) == (2, 2)
    drained = sim.count(Drain)
    sim.run(60, lambda sim: load(sim, "prod/a/x", "prod/b/z"))
    assert sim.count(Drain) == drained  # no worker goes back and forth


def test_only_a_preemptible_function_returns_its_last_worker() -> None:
    for priority, workers in ((Priority.NORMAL, 0), (Priority.LOW, 2)):
        sim = cluster(team("a"), team("b"))
        functions = tuple(f"prod/a/f{number}" for number in range(4))
        deploy(sim, *functions, priority=priority)
        deploy(sim, "prod/b/z")
        sim.run(20, lambda sim, functions=functions: load(sim, *functions))  # type: ignore[misc]
        sim.run(40, lambda sim, functions=functions: load(sim, *functions, "prod/b/z"))  # type: ignore[misc]
        assert sim.workers("prod/b/z") == workers


def test_a_team_with_less_usage_goes_first() -> None:
    sim = cluster(team("a"), team("b"), gpus=1)
    deploy(sim, "prod/a/x", "prod/b/z")
    sim.world.team_use.observe({"a": 1.0}, sim.now - 100)
    sim.world.team_use.observe({"a": 1.0}, sim.now)
    for name in ("prod/a/x", "prod/b/z"):
        sim.queues[name, 1] = [sim.now]
    sim.run(2.2)
    assert sim.done == {"prod/b/z": 1}


@pytest.mark.parametrize(("limits", "resources"), [({"workers": 2}, Resources(cpu=0.1)), ({"gpus": 2}, ONE_GPU)])
def test_a_team_holds_no_more_than_its_limit_which_is_the_reason_to_wait(
    limits: dict[str, float], resources: Resources
) -> None:
    sim = cluster(team("a", **limits))
    deploy(sim, "prod/a/x", "prod/a/y", resources=resources)
    most = 0

    def step(sim: Sim) -> None:
        nonlocal most
        load(sim, "prod/a/x")
        most = max(most, sim.workers("prod/a/x") + sim.workers("prod/a/y"))

    sim.run(20, step)
    assert most == 2
    sim.call("prod/a/y")
    sim.run(1.5, step)
    waiting = sim.statuses["prod/a/y"].waiting
    assert waiting is not None
    assert waiting.reason is WaitReason.LIMIT
    assert "team a" in waiting.detail
    sim.run(20, step)  # a function of the team with several workers ends one
    assert sim.done["prod/a/y"] == 1


@pytest.mark.parametrize(
    ("named", "of_a", "of_b", "domains"),
    [
        ("", (), (), ["team/a"] * 2),
        ("ours", (), (), ["team/a/ours"] * 2),
        ("ours", ("ours",), (), ["shared/ours"] * 2),
        ("ours", (), ("ours",), ["team/a/ours"] * 2),
        ("ours", ("ours",), ("ours",), ["shared/ours"] * 3),
    ],
)
def test_teams_share_a_gpu_only_in_a_domain_that_both_have(
    named: str, of_a: tuple[str, ...], of_b: tuple[str, ...], domains: list[str]
) -> None:
    part = Resources(cpu=0.1, gpu=("any",), share=Share.TIME, trust_domain=named)
    teams = (msgspec.structs.replace(team(name), trust_domains=have) for name, have in (("a", of_a), ("b", of_b)))
    sim = cluster(*teams, gpus=1)
    names = ("prod/a/x", "prod/a/y", "prod/b/z")
    deploy(sim, *names, resources=part)
    for name in names:
        sim.call(name)
    sim.run(0.2)
    assert [worker.assignment.share.trust_domain for worker in sim.world.workers.values()] == domains


def test_a_function_without_a_team_shares_no_gpu_with_a_team() -> None:
    sim = cluster(msgspec.structs.replace(team("a"), trust_domains=("ours",)), gpus=1)
    deploy(sim, "prod/a/x", "free", resources=Resources(cpu=0.1, gpu=("any",), share=Share.TIME, trust_domain="ours"))
    sim.call("prod/a/x")
    sim.run(0.2)
    sim.call("free")
    sim.run(0.2)
    assert (sim.workers("prod/a/x"), sim.workers("free")) == (1, 0)
