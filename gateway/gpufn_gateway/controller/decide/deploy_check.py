"""When the check of a new revision ends: a worker of it has started, could not start, or finds no room. Pure."""

from __future__ import annotations

from typing import Final

from gpufn_core.domain.revision import CheckState, Function, Revision
from gpufn_core.domain.worker import WorkerState
from gpufn_core.errors import ErrorInfo, WorkerLost
from gpufn_gateway.controller.decide import policy
from gpufn_gateway.controller.decide.actions import Decided, EndCheck, Need
from gpufn_gateway.controller.decide.rollout import Role
from gpufn_gateway.controller.state.views import RevisionView, WorkerView

ROOM_WITHIN_S: Final = 5.0  # for a node to report, or for the room that a rollout makes


def held(view: RevisionView) -> list[WorkerView]:
    """The workers that are not on their way out."""
    return view.in_state(
        WorkerState.READY, WorkerState.STARTING, WorkerState.RESUMING, WorkerState.PARKING, WorkerState.PARKED
    )


def is_only_check(one: Decided, serving: RevisionView) -> bool:
    """Whether a worker of a revision is wanted for its check alone, so that no other worker makes room for it: nothing
    is queued, and no warm worker of `serving` is to be replaced."""
    if one.revision is None or not one.revision.is_checked_first or (one.demand is not None and one.demand.calls):
        return False
    return one.role is Role.SERVING or not held(serving)


def ended(one: Decided, function: Function) -> EndCheck | None:
    """The end of a check, as far as the revision's workers decide it."""
    record = one.revision
    if record is None or not record.is_checked_first:
        return None
    if one.view.in_state(WorkerState.READY):
        return EndCheck(*one.key, CheckState.PASSED)
    error = one.view.circuit.last_error
    if error is not None and not (_may_be_building(record, error) and not one.view.circuit.openings):
        return EndCheck(*one.key, CheckState.FAILED, error=error)
    if one.role is Role.RETIRED:
        return EndCheck(*one.key, CheckState.UNCHECKED, f"revision {function.active} took its place")
    if policy.effective(record.spec.scaling, function).max_workers == 0:
        return EndCheck(*one.key, CheckState.UNCHECKED, "max_workers is 0")
    return None


def _may_be_building(record: Revision, error: ErrorInfo) -> bool:
    """Whether a start may have taken too long because its node builds the image meanwhile: the next one finds it."""
    return record.spec.image is not None and error.code == WorkerLost.code


def without_room(need: Need, now: float, *, has_nodes: bool) -> EndCheck | None:
    """The end of a check that no node has room for; None while there may be room in a moment."""
    if not need.revision.is_checked_first or need.is_slot_limited or need.has_begun or not need.has_no_room:
        return None
    if has_nodes and not need.no_room:  # a later step works out why
        return None
    waited_s = now - (now if need.view.waiting_since is None else need.view.waiting_since)
    if waited_s < ROOM_WITHIN_S and not (need.is_check and has_nodes):
        return None
    return EndCheck(*need.key, CheckState.UNCHECKED, need.no_room or "no node is connected")
