"""Moves of idle workers that make room for a waiting function."""

from __future__ import annotations

from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.actions import Drain, Start
from tests.gateway.controller.simulation import GIB, Sim, cpu, node, revision

LARGE = Resources(memory_bytes=6 * GIB)
SMALL = Resources(memory_bytes=3 * GIB)
_ALWAYS = ScalingPolicy(min_workers=1)


def _deploy(sim: Sim, name: str, resources: Resources, scaling: ScalingPolicy | None = None) -> None:
    sim.deploy(revision(name, 1, scaling, resources))


def _placed(sim: Sim) -> dict[str, list[str]]:
    placed: dict[str, list[str]] = {}
    for view in sim.world.workers.values():
        placed.setdefault(view.key[0], []).append(view.assignment.node)
    return placed


def test_idle_workers_move_together_when_a_function_fits_nowhere() -> None:
    sim = Sim(node("a", cpu()), node("b", cpu()))
    _deploy(sim, "one", SMALL, _ALWAYS)
    sim.run(2)
    _deploy(sim, "filler", Resources(memory_bytes=4 * GIB))  # fits beside `one`; then `two` does not
    sim.call("filler")
    sim.run(2)
    _deploy(sim, "two", SMALL, _ALWAYS)
    sim.run(400)  # the filler ends
    placed = _placed(sim)
    assert sorted(placed) == ["one", "two"]
    assert placed["one"] != placed["two"], "each node has a hole of 5 GiB"
    before = len(sim.history)
    _deploy(sim, "large", LARGE)
    sim.call("large")
    sim.run(3)
    assert sim.done == {"filler": 1, "large": 1}
    moves = sim.history[before:]
    assert [action.function for action in moves if isinstance(action, Start)][-1] == "large"
    assert sum(isinstance(action, Drain) for action in moves) == 1
    after = _placed(sim)
    assert after["one"] == after["two"], "both share a node now"
    assert (sim.workers("one"), sim.workers("two")) == (1, 1)


def test_nobody_moves_if_a_worker_would_have_no_place() -> None:
    sim = Sim(node("a", cpu()))
    _deploy(sim, "one", SMALL, _ALWAYS)
    sim.run(2)
    before = len(sim.history)
    _deploy(sim, "large", LARGE)
    sim.call("large")
    sim.run(3)
    assert sim.done == {}
    assert not [action for action in sim.history[before:] if isinstance(action, (Drain, Start))]
    assert sim.workers("one") == 1
