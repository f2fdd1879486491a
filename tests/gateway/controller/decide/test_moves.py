"""Moves of idle workers that make room for a waiting function."""

from __future__ import annotations

from typing import Any

from gpufn_core.domain.worker import WorkerState
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


def _ready(sim: Sim, name: str) -> int:
    return len(sim.world.view((name, 1)).in_state(WorkerState.READY))


def _with_holes(**options: Any) -> Sim:
    """Return two nodes of 8 GiB, each with an idle worker of 3 GiB that `min_workers` keeps."""
    sim = Sim(node("a", cpu()), node("b", cpu()), **options)
    _deploy(sim, "one", SMALL, _ALWAYS)
    sim.run(2)
    _deploy(sim, "filler", Resources(memory_bytes=4 * GIB))  # fits beside `one`; then `two` does not
    sim.call("filler")
    sim.run(2)
    _deploy(sim, "two", SMALL, _ALWAYS)
    sim.run(400)  # the filler ends
    return sim


def test_a_worker_stays_if_its_replacement_does_not_start() -> None:
    broken: list[bool] = []
    sim = _with_holes(fails=lambda key: bool(broken) and key[0] != "large")
    broken.append(True)
    _deploy(sim, "large", LARGE)
    sim.call("large")
    sim.run(60)
    assert "large" not in sim.done
    assert (_ready(sim, "one"), _ready(sim, "two")) == (1, 1)
    sim.call("one")
    sim.call("two")
    sim.run(2)
    assert (sim.done["one"], sim.done["two"]) == (1, 1)


def test_idle_workers_move_together_when_a_function_fits_nowhere() -> None:
    sim = _with_holes()
    placed = _placed(sim)
    assert sorted(placed) == ["one", "two"]
    assert placed["one"] != placed["two"], "each node has a hole of 5 GiB"
    before = len(sim.history)
    _deploy(sim, "large", LARGE)
    sim.call("large")
    least = {"one": 1, "two": 1}

    def each(sim: Sim) -> None:
        for name, count in least.items():
            least[name] = min(count, _ready(sim, name))

    sim.run(5, each)
    assert sim.done == {"filler": 1, "large": 1}
    assert least == {"one": 1, "two": 1}, "each always has a READY worker"
    moves = sim.history[before:]
    assert [action.function for action in moves if isinstance(action, Start)][-1] == "large"
    assert sum(isinstance(action, Drain) for action in moves) == 1
    after = _placed(sim)
    assert after["one"] == after["two"], "both share a node now"
    assert (sim.workers("one"), sim.workers("two")) == (1, 1)


def test_no_worker_moves_if_one_would_have_no_place() -> None:
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
