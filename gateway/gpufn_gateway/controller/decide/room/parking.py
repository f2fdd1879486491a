"""Admission to parking, and the parked workers that make room: `admit(world, worker) -> Admission`. Pure."""

from __future__ import annotations

import msgspec

from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.units import format_bytes
from gpufn_gateway.controller.placement.request import cpu_pool
from gpufn_gateway.controller.state.views import RevisionView, WorkerView
from gpufn_gateway.controller.state.world import World

_MIN_BYTES = 1 << 20  # with less memory left there is no point in parking


class Admission(msgspec.Struct, frozen=True):
    """The worker may take `host_bytes`; 0 means that it is not parked, and `why`. `expected_bytes` is the expected use,
    as far as it is known. With `victims` the worker may park once they have ended."""

    host_bytes: int = 0
    expected_bytes: int = 0
    victims: tuple[str, ...] = ()
    why: str = ""


def admit(world: World, worker: WorkerView, reserved_bytes: int = 0) -> Admission:
    """`reserved_bytes` of the node's memory are reserved for other workers that this step parks."""
    view, node = world.view(worker.key), world.nodes.get(worker.assignment.node)
    if not _wants_parking(world, worker) or node is None or node.report is None:
        return Admission()
    if why := view.no_parking_reason or view.slower_resume:
        return Admission(why=why)
    budget_bytes, expected_bytes = node.report.park_bytes, _expected(view, worker)
    if budget_bytes < max(expected_bytes, _MIN_BYTES):
        offered = f"{node.report.node} has {format_bytes(budget_bytes)} for parked workers"
        return Admission(why=f"it needs {format_bytes(expected_bytes)}, and {offered}")
    free_bytes = _free(world, node.report) - reserved_bytes
    if free_bytes >= max(expected_bytes, _MIN_BYTES):
        if view.parked_bytes is None:  # else all workers that first park at the same time could get the same memory
            expected_bytes = max(expected_bytes, min(_held(node.report, worker), free_bytes))
        return Admission(free_bytes, expected_bytes)
    wanted_bytes = max(expected_bytes, _MIN_BYTES) - free_bytes
    victims = world.holdings.host_memory(node.report.node).victims(wanted_bytes)
    return Admission(victims=tuple(victims), why="no host memory is left")


def _wants_parking(world: World, worker: WorkerView) -> bool:
    """Return whether the function uses parking, and calls will go to this revision."""
    function, record = world.functions.get(worker.key[0]), world.revisions.get(worker.key)
    if function is None or record is None or worker.state is not WorkerState.READY:
        return False
    return record.spec.park_timeout_s > 0 and worker.key[1] == function.serving == function.active


def _expected(view: RevisionView, worker: WorkerView) -> int:
    """Return the bytes that an earlier worker of this revision needed to park; otherwise all GPU memory that it may
    use."""
    return view.parked_bytes if view.parked_bytes is not None else worker.assignment.share.vram_bytes


def _held(report: NodeReport, worker: WorkerView) -> int:
    """Return the GPU memory in use as the agent measures it: parking hardly takes more. 0 if it is not reported."""
    name = worker.assignment.worker
    return next((sum(each.gpu_bytes.values()) for each in report.processes if each.worker == name), 0)


def _free(world: World, report: NodeReport) -> int:
    """Return the free bytes: within the operator's budget, and not leased."""
    pool = cpu_pool(report)
    unleased = pool.memory_bytes - world.leases.used(report.node).memory_bytes if pool is not None else 0
    return min(report.park_bytes - world.holdings.host_memory(report.node).used, unleased)
