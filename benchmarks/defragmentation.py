"""Utilisation of GPUs before and after moves of idle workers, by the pure code of the controller.

    python benchmarks/defragmentation.py [--rounds 5]

100 nodes of 8 GPUs are filled with workers that share GPUs by MPS. A random part of the workers ends. The rest is idle
and is kept by `min_workers`. Then functions arrive that need a whole GPU each, until one fits nowhere.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

import measure
from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType, MpsLevel, NodeFacts, Share
from gpufn_core.domain.worker import Assignment
from gpufn_core.protocol.reports import NodeReport
from gpufn_core.spec.resources import Resources
from gpufn_gateway.controller.decide.room.moves import find_moves
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement, place
from gpufn_gateway.controller.placement.request import Requirements
from gpufn_gateway.controller.state.leases import LeaseBook
from gpufn_gateway.controller.state.views import WorkerView

_GIB = 1 << 30
_LIMITS = Limits()
_NODES, _GPUS, _GPU_GIB = 100, 8, 80
_SIZES_GIB = (10, 20, 30, 40)
_STAYING = (0.2, 0.4, 0.6, 0.8)  # the part of the workers that stays
_WHOLE = Requirements(Resources(gpu=("any",)))


def main() -> None:
    options = measure.arguments("Defragmentation.", rounds=5)
    about = measure.machine()
    result = {
        str(staying): [_round(staying, random.Random(seed)) for seed in range(options.rounds)] for staying in _STAYING
    }
    rows = []
    for staying, rounds in result.items():
        medians = [f"{statistics.median(each[name] for each in rounds):{form}}" for name, form in _SHOWN]
        rows.append([f"{float(staying):.0%}", *medians])
    heading = [
        "workers that stay",
        "free memory",
        "whole GPUs placed",
        "with moves",
        "moved",
        "GPUs in use",
        "with moves",
    ]
    table = measure.table(heading, rows)
    measure.write("defragmentation", result, table, about)


_SHOWN = (
    ("free", ".0%"), ("placed", ".0f"), ("placed_with_moves", ".0f"), ("moved", ".0f"),
    ("memory_in_use", ".0%"), ("memory_in_use_with_moves", ".0%"),
)  # fmt: skip


def _round(staying: float, rng: random.Random) -> dict[str, float]:
    nodes = [_node(f"n{number}") for number in range(_NODES)]
    book = LeaseBook()
    workers = _fill(nodes, book, rng)
    for name in rng.sample(sorted(workers), round(len(workers) * (1 - staying))):
        book.release(name)
        del workers[name]
    shared = sum(share.vram_bytes for _, share in workers.values()) / (_NODES * _GPUS * _GPU_GIB * _GIB)
    placed = _place_whole(nodes, book.copy())
    with_moves, moved = _place_whole_with_moves(nodes, book, workers)
    return {
        "free": 1 - shared,
        "placed": placed,
        "placed_with_moves": with_moves,
        "moved": moved,
        "memory_in_use": shared + placed / (_NODES * _GPUS),
        "memory_in_use_with_moves": shared + with_moves / (_NODES * _GPUS),
    }


def _node(name: str) -> NodeReport:
    pool = Device("cpu", DeviceType.CPU, "x86", 2048 * _GIB, 128.0)
    gpus = (Device(f"{name}-{number}", DeviceType.GPU, "NVIDIA H100", _GPU_GIB * _GIB) for number in range(_GPUS))
    return NodeReport(name, 0.0, (pool, *gpus), facts=NodeFacts(mps=MpsLevel.V2))


def _shared(vram_bytes: int) -> Requirements:
    return Requirements(Resources(gpu=("any",), share=Share.MPS, vram_bytes=vram_bytes))


def _fill(nodes: Sequence[NodeReport], book: LeaseBook, rng: random.Random) -> dict[str, tuple[str, DeviceShare]]:
    """Place workers of random sizes until one fits nowhere. Return the node and the share of each."""
    workers: dict[str, tuple[str, DeviceShare]] = {}
    while isinstance(found := place(_shared(rng.choice(_SIZES_GIB) * _GIB), nodes, book, _LIMITS), Placement):
        name = f"w{len(workers)}"
        book.grant(name, found.node, found.share)
        workers[name] = found.node, found.share
    return workers


def _place_whole(nodes: Sequence[NodeReport], book: LeaseBook) -> int:
    """Return how many workers with a whole GPU each have room."""
    count = 0
    while isinstance(found := place(_WHOLE, nodes, book, _LIMITS), Placement):
        book.grant(f"whole{count}", found.node, found.share)
        count += 1
    return count


def _place_whole_with_moves(
    nodes: Sequence[NodeReport], book: LeaseBook, workers: dict[str, tuple[str, DeviceShare]]
) -> tuple[int, int]:
    """Like `_place_whole`, with moves of idle workers. Also return the number of moves."""
    count, moved = 0, 0
    idle = {name: _view(name, node, share) for name, (node, share) in workers.items()}
    while True:
        found = place(_WHOLE, nodes, book, _LIMITS)
        if isinstance(found, NoRoom):
            moves = find_moves(
                list(idle.values()),
                nodes,
                book,
                place_waiting=lambda among, trial: place(_WHOLE, among, trial, _LIMITS, best=False),
                place_again=lambda worker, trial: place(
                    _shared(worker.assignment.share.vram_bytes), nodes, trial, _LIMITS
                ),
            )
            if not moves:
                return count, moved
            for move in moves:
                del idle[move.worker.assignment.worker]
                name = f"moved{moved}"
                book.release(move.worker.assignment.worker)
                book.grant(name, move.to.node, move.to.share)
                idle[name] = _view(name, move.to.node, move.to.share)
                moved += 1
            continue
        book.grant(f"whole{count}", found.node, found.share)
        count += 1


def _view(name: str, node: str, share: DeviceShare) -> WorkerView:
    assignment = Assignment(worker=name, node=node, function="f", revision=1, share=share, epoch=1, created_at=0.0)
    return WorkerView(assignment, 0.0)


if __name__ == "__main__":
    main()
