"""The cost and the reports of a controller step on a large fleet where many functions have no room."""

from __future__ import annotations

import re
import sys
from types import FrameType

import msgspec
import pytest

from gpufn_core.domain.devices.device import DeviceShare, Health
from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import FunctionStatus, RunnerReport, WorkerReport
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.plan import plan
from gpufn_gateway.controller.state.world import World
from tests.gateway.controller.simulation import GIB, assignment, cpu, function, gpu, node, revision

NODES, FUNCTIONS = 1000, 400
FLEET = [
    node(f"node-{n:04}", cpu(64, 512 * GIB), *(gpu(f"GPU-{n:04}-{g}", "NVIDIA H100", 80 * GIB) for g in range(8)))
    for n in range(NODES)
]
NAMES = [f"waits-{number:03}" for number in range(FUNCTIONS)]


def fleet(wants: list[Resources]) -> World:
    """Return 1,000 nodes with 8 H100 each; 400 functions have calls, with the requests `wants` in turn."""
    world = World(100.0)
    for report in FLEET:
        world.on_node_report(report, 100.0)
        world.on_runner_report(RunnerReport(report.node, "r", 100.0), 100.0)
    for number, name in enumerate(NAMES):
        world.on_revision((name, 1), revision(name, resources=wants[number % len(wants)]))
        world.on_function(name, function(name))
    world.on_depths({(name, 1): 3 for name in NAMES}, 100.0, 100.0)
    return world


def python_calls(world: World) -> tuple[int, dict[str, FunctionStatus]]:
    """Return the number of Python function calls in one full step: unlike seconds, it is the same on every machine."""
    count = 0

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        statuses = plan(world, 100.0).statuses
    finally:
        sys.setprofile(before)
    return count, statuses


@pytest.mark.parametrize(
    ("wants", "per_function"),
    [
        ([Resources(gpu=("B200",))], 320),
        ([Resources(gpu=("B200",), memory_bytes=GIB + mib) for mib in range(FUNCTIONS)], 320),
        ([Resources(memory_bytes=600 * GIB + mib) for mib in range(8)], 320),
    ],
)
def test_a_step_looks_at_the_nodes_once_per_kind_of_request(wants: list[Resources], per_function: int) -> None:
    calls, statuses = python_calls(fleet(wants))
    assert len(statuses) == FUNCTIONS
    assert calls < FUNCTIONS * per_function + NODES * 200


def test_functions_without_room_are_explained_briefly() -> None:
    statuses = plan(fleet([Resources(gpu=("B200",))]), 100.0).statuses
    details = {status.waiting.detail for status in statuses.values() if status.waiting is not None}
    (detail,) = details
    assert all(fact in detail for fact in ("1,000 nodes", "node-0000, node-0001, node-0002, ...", "B200"))
    assert len(encode(tuple(statuses.values()))) < 256 << 10


def test_a_step_explains_some_kinds_of_request_and_the_next_ones_the_others() -> None:
    world = fleet([Resources(memory_bytes=600 * GIB + number) for number in range(20)])
    explained: list[int] = []
    for now in (100.0, 101.0, 102.0):
        for report in FLEET:
            world.on_node_report(report, now)
            world.on_runner_report(RunnerReport(report.node, "r", now), now)
        world.on_depths({(name, 1): 3 for name in NAMES}, now, now)
        texts = {name: status.waiting.detail for name, status in plan(world, now).statuses.items() if status.waiting}
        assert len(texts) == FUNCTIONS
        explained.append(sum("600 GiB of memory, 512 GiB are free at most" in text for text in texts.values()))
    assert explained == [160, 320, 400]


def test_causes_and_names_of_nodes_are_bounded_for_many_different_nodes() -> None:
    world = World(100.0)
    for number in range(300):
        sick = msgspec.structs.replace(cpu(), health=Health.DEGRADED, health_reason=f"disk {number} is full " * 50)
        world.on_node_report(node(f"node-{number:03}", sick), 100.0)
        world.on_runner_report(RunnerReport(f"node-{number:03}", "r", 100.0), 100.0)
    world.on_revision(("f", 1), revision("f"))
    world.on_function("f", function("f"))
    world.on_depths({("f", 1): 1}, 100.0, 100.0)
    waiting = plan(world, 100.0).statuses["f"].waiting
    assert waiting is not None
    assert len(re.findall("node-", waiting.detail)) == 4
    assert len(waiting.detail) < 1000, "gpufn why prints it on a terminal"
    assert "296 more nodes" in waiting.detail


def test_workers_that_could_go_are_looked_for_once_per_kind_of_request() -> None:
    """500 idle workers are protected by min_workers: no waiting function may take the place of any of them."""
    world = fleet([Resources(memory_bytes=510 * GIB)])
    world.on_revision(("kept", 1), revision("kept", scaling=ScalingPolicy(min_workers=NODES, max_workers=NODES)))
    world.on_function("kept", function("kept"))
    for report in FLEET:
        name = f"w-{report.node}"
        share = DeviceShare(cpu_device="cpu", cores=0.1, memory_bytes=4 * GIB)
        made = msgspec.structs.replace(assignment(name, "kept", node=report.node), share=share)
        world.on_assignment(name, made, 90.0)
        told = WorkerReport(name, "kept", 1, WorkerState.READY, 1, idle_since=0.0)
        world.on_runner_report(RunnerReport(report.node, "r", 100.0, (told,)), 100.0)
    calls, statuses = python_calls(world)
    waiting = statuses["waits-399"].waiting
    assert waiting is not None
    assert waiting.detail.startswith("1,000 nodes (node-0000, node-0001, node-0002, ...): needs 510 GiB of memory, 508")
    assert waiting.detail.endswith("held by kept (1000 workers, min_workers=1000)")
    assert calls < FUNCTIONS * 300 + NODES * 300
