"""Defragmentation: moves of idle workers that make room for a revision that fits nowhere. Pure.

Placement leaves holes. Two GPUs that are half used have no room for a worker that needs a whole one, although one GPU
could hold both halves. `find_moves` looks for a node where idle workers could leave, because each of them has room
elsewhere. A replacement starts there first. The idle worker leaves once the replacement is READY (`World.moving`), so
no function loses a worker, also if the replacement does not start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gpufn_core.protocol.reports import NodeReport
from gpufn_gateway.controller.placement.node_choice import NoRoom, Placement
from gpufn_gateway.controller.state.leases import LeaseBook
from gpufn_gateway.controller.state.views import WorkerView

# Returns the place of a new worker of the waiting revision on one of these nodes.
PlaceWaiting = Callable[[Sequence[NodeReport], LeaseBook], Placement | NoRoom]
# Returns the place of a new worker of the same revision as this one.
PlaceAgain = Callable[[WorkerView, LeaseBook], Placement | NoRoom]

_WAITING = "waiting"  # the lease of the waiting revision, in a trial
_MAX_TRIED = 8


class Move(msgspec.Struct, frozen=True):
    """A new worker of the same revision starts in `to`, and then `worker` leaves."""

    worker: WorkerView
    to: Placement


def find_moves(
    idle: Sequence[WorkerView],
    nodes: Sequence[NodeReport],
    book: LeaseBook,
    *,
    place_waiting: PlaceWaiting,
    place_again: PlaceAgain,
) -> tuple[Move, ...]:
    """Return moves that make room on one node, one with few workers of `idle`; empty if there are none.

    Only a few nodes are tried, because each try looks at all nodes for the replacements.
    """
    by_node: dict[str, list[WorkerView]] = {}
    without = book.copy()
    for worker in idle:
        by_node.setdefault(worker.assignment.node, []).append(worker)
        without.release(worker.assignment.worker)
    roomy = [node for node in nodes if node.node in by_node and not isinstance(place_waiting([node], without), NoRoom)]
    roomy.sort(key=lambda node: len(by_node[node.node]))
    tries = (_moves_on(node, by_node[node.node], book, place_waiting, place_again) for node in roomy[:_MAX_TRIED])
    return next(filter(None, tries), ())


def _moves_on(
    node: NodeReport,
    there: Sequence[WorkerView],
    book: LeaseBook,
    place_waiting: PlaceWaiting,
    place_again: PlaceAgain,
) -> tuple[Move, ...]:
    trial = book.copy()
    leaving: list[WorkerView] = []
    for worker in there:
        trial.release(worker.assignment.worker)
        leaving.append(worker)
        if not isinstance(place_waiting([node], trial), NoRoom):
            break
    else:
        return ()
    for worker in list(leaving):  # workers whose removal did not help stay
        lease = worker.assignment
        trial.grant(lease.worker, lease.node, lease.share)
        if isinstance(place_waiting([node], trial), NoRoom):
            trial.release(lease.worker)
        else:
            leaving.remove(worker)
    waiting = place_waiting([node], trial)
    assert not isinstance(waiting, NoRoom)
    trial.grant(_WAITING, waiting.node, waiting.share)  # replacements must leave this room alone
    moves: list[Move] = []
    for worker in leaving:
        to = place_again(worker, trial)
        if isinstance(to, NoRoom):
            return ()
        trial.grant(f"instead-of-{worker.assignment.worker}", to.node, to.share)
        moves.append(Move(worker, to))
    return tuple(moves)
