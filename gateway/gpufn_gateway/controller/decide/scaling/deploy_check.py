"""The end of a new revision's check: one of its workers started, failed to start, or has no room. Pure."""

from __future__ import annotations

from typing import Final

from gpufn_core.domain.revision import CheckState, Function, Revision
from gpufn_core.domain.worker import WorkerState
from gpufn_core.errors import ErrorInfo, WorkerLost
from gpufn_gateway.controller.decide.actions import EndCheck, Need, RevisionDecision
from gpufn_gateway.controller.decide.scaling import policy
from gpufn_gateway.controller.decide.scaling.rollout import Role
from gpufn_gateway.controller.state.views import RevisionView, WorkerView

ROOM_WITHIN_S: Final = 5.0  # time for a node to report, or for a rollout to make room


def staying_workers(view: RevisionView) -> list[WorkerView]:
    """Return the workers that are not leaving."""
    return view.in_state(
        WorkerState.READY, WorkerState.STARTING, WorkerState.RESUMING, WorkerState.PARKING, WorkerState.PARKED
    )


def is_only_check(decided: RevisionDecision, serving: RevisionView) -> bool:
    """Return whether a worker of the revision is wanted only for its check, so that no other worker makes room for it.
    Then no call is queued, and no warm worker of `serving` has to be replaced."""
    demand = decided.demand
    if decided.revision is None or not decided.revision.is_checked_first or (demand is not None and demand.calls):
        return False
    return decided.role in (Role.SERVING, Role.SPLIT) or not staying_workers(serving)


def end_of_check(decided: RevisionDecision, function: Function) -> EndCheck | None:
    """Return the end of the check if the revision's workers decide it."""
    record = decided.revision
    if record is None or not record.is_checked_first:
        return None
    if decided.view.in_state(WorkerState.READY):
        return EndCheck(*decided.key, CheckState.PASSED)
    error = decided.view.circuit.last_error
    if error is not None and not (_was_preparing(record, error) and not decided.view.circuit.openings):
        return EndCheck(*decided.key, CheckState.FAILED, error=error)
    if decided.role is Role.RETIRED:
        return EndCheck(*decided.key, CheckState.UNCHECKED, f"revision {function.active} took its place")
    if policy.effective(record.spec.scaling, function).max_workers == 0:
        return EndCheck(*decided.key, CheckState.UNCHECKED, "max_workers is 0")
    return None


def _was_preparing(record: Revision, error: ErrorInfo) -> bool:
    """Return whether the start may have timed out because the node was building the image or fetching weights or
    volumes. This continues, and the next start finds them."""
    spec = record.spec
    return (spec.image is not None or bool(spec.weights or spec.mounts)) and error.code == WorkerLost.code


def end_without_room(need: Need, now: float, *, has_nodes: bool) -> EndCheck | None:
    """Return the end of a check that no node has room for; None while there may still be room in a moment."""
    if not need.revision.is_checked_first or need.is_slot_limited or need.has_begun or not need.has_no_room:
        return None
    if has_nodes and not need.no_room:  # a later step computes the reason
        return None
    waited_s = now - (now if need.view.waiting_since is None else need.view.waiting_since)
    if waited_s < ROOM_WITHIN_S and not (need.is_check and has_nodes):
        return None
    return EndCheck(*need.key, CheckState.UNCHECKED, need.no_room or "no node is connected")
