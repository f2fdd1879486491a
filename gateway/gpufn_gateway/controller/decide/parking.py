"""Whether an idle worker is parked, and who goes for it: `admit(world, worker) -> Admission`. Pure."""

from __future__ import annotations

import msgspec

from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway.controller.placement.request import cpu_pool
from gpufn_gateway.controller.state.views import RevisionView, WorkerView
from gpufn_gateway.controller.state.world import World

_LEAST_BYTES = 1 << 20  # with less left there is no point in asking


class Admission(msgspec.Struct, frozen=True):
    """`host_bytes` are its to take; 0: it is not parked, and `why`. `expected_bytes` is what it will take, as far as is
    known. With `victims` it may park once they have ended."""

    host_bytes: int = 0
    expected_bytes: int = 0
    victims: tuple[str, ...] = ()
    why: str = ""


def admit(world: World, worker: WorkerView, promised_bytes: int = 0) -> Admission:
    """`promised_bytes` of its node's memory for others that this step parks."""
    view, node = world.view(worker.key), world.nodes.get(worker.assignment.node)
    if not _is_to_be_parked(world, worker) or node is None or node.report is None:
        return Admission()
    if view.cannot_park:
        return Admission(why=view.cannot_park)
    budget_bytes, expected_bytes = node.report.park_bytes, _expected(view, worker)
    if budget_bytes < max(expected_bytes, _LEAST_BYTES):
        told = f"{node.report.node} has {budget_bytes >> 20} MiB for parked workers"
        return Admission(why=f"it takes {expected_bytes >> 20} MiB, and {told}")
    free_bytes = _free(world, node.report) - promised_bytes
    if free_bytes >= max(expected_bytes, _LEAST_BYTES):
        if view.parked_bytes is None:  # or all that park at once for the first time could have the same memory
            expected_bytes = max(expected_bytes, min(_held(node.report, worker), free_bytes))
        return Admission(free_bytes, expected_bytes)
    wanted_bytes = max(expected_bytes, _LEAST_BYTES) - free_bytes
    victims = world.holdings.host_memory(node.report.node).victims(wanted_bytes)
    return Admission(victims=tuple(victims), why="the host has no memory left")


def _is_to_be_parked(world: World, worker: WorkerView) -> bool:
    """Its function asks for it, and calls will come to this revision."""
    function, record = world.functions.get(worker.key[0]), world.revisions.get(worker.key)
    if function is None or record is None or worker.state is not WorkerState.READY:
        return False
    return record.spec.park_timeout_s > 0 and worker.key[1] == function.serving == function.active


def _expected(view: RevisionView, worker: WorkerView) -> int:
    """As much as its like took before; else all that it may have of its GPU."""
    return view.parked_bytes if view.parked_bytes is not None else worker.assignment.share.vram_bytes


def _held(report: NodeReport, worker: WorkerView) -> int:
    """Of its GPUs, as its agent sees it: it will hardly take more of the host. 0 where nobody tells."""
    name = worker.assignment.worker
    return next((sum(each.gpu_bytes.values()) for each in report.processes if each.worker == name), 0)


def _free(world: World, report: NodeReport) -> int:
    """Within the operator's budget, and of what no lease has."""
    pool = cpu_pool(report)
    unleased = pool.memory_bytes - world.leases.used(report.node).memory_bytes if pool is not None else 0
    return min(report.park_bytes - world.holdings.host_memory(report.node).used, unleased)
