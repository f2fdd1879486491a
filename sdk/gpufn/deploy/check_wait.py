"""The wait for the check of a new revision: one worker of it starts before calls go there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from gpufn.client.views import FunctionView, RevisionProgress
from gpufn_core.domain.circuit_errors import user_line
from gpufn_core.domain.revision import Check, CheckState, RevisionState
from gpufn_core.errors import Conflict, FunctionStartFailed, RevisionNotFound

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_KNOWN_WITHIN_S = 5.0  # the gateway's own view of the two records may lag behind its answer
_BEYOND_START_S = 30.0  # for the node to unpack the bundle, beside the startup_timeout of the worker
_STARTS_WITH_IMAGE = 3  # while its node may build the image, a start that is late is tried again


class Api(Protocol):
    """The methods of a Client that the wait needs."""

    def revision(self, name: str, number: int) -> RevisionProgress: ...


def is_pending(view: FunctionView) -> bool:
    return view.check is not None and view.check.state is CheckState.PENDING


def wait_until_checked(
    api: Api,
    view: FunctionView,
    startup_timeout_s: float,
    timeout_s: float | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Check | None:
    """The check of the active revision as it ended; None for a revision without one.

    Raises FunctionStartFailed when its worker does not start, Conflict when another revision took its place, and
    TimeoutError.
    """
    if not is_pending(view):
        return view.check
    name, number = view.name, view.active
    began, pause_s = clock(), _FIRST_PAUSE_S
    starts = _STARTS_WITH_IMAGE if view.spec.get("image") else 1
    patience_s = starts * startup_timeout_s + _BEYOND_START_S if timeout_s is None else timeout_s
    while True:
        revision = _revision(api, name, number)
        if revision is not None and revision.state is RevisionState.FAILED:
            raise _start_failed(view, revision)
        if revision is not None and (revision.check is None or revision.check.state is not CheckState.PENDING):
            return revision.check
        waited_s = clock() - began
        if waited_s >= _KNOWN_WITHIN_S and (revision is None or not revision.active):
            raise Conflict(f"{name}@{number} was replaced before it was checked")
        if waited_s >= patience_s:
            raise TimeoutError(f"no worker of {name}@{number} is ready after {patience_s:g} s; `gpufn why {name}`")
        sleep(pause_s)
        pause_s = min(pause_s * 1.2, _LONGEST_PAUSE_S)


def _revision(api: Api, name: str, number: int) -> RevisionProgress | None:
    try:
        return api.revision(name, number)
    except RevisionNotFound:
        return None


def _start_failed(view: FunctionView, revision: RevisionProgress) -> FunctionStartFailed:
    which = f"{view.name}@{revision.number} does not start"
    if view.serving != revision.number:
        which += f", {view.name}@{view.serving} still serves"
    if revision.error is None:
        return FunctionStartFailed(which)
    line = user_line(revision.error)
    return FunctionStartFailed(f"{which}: {revision.error.summary}" + (f"\n  {line}" if line else ""))
