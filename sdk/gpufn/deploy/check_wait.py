"""Wait for the check of a new revision: one of its workers starts before calls go to the revision."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Protocol

from gpufn.client.views.functions import FunctionView, RevisionProgress
from gpufn_core.domain.circuit_errors import user_line
from gpufn_core.domain.revision import Check, CheckState, RevisionState
from gpufn_core.errors import Conflict, FunctionStartFailed, RevisionNotFound

_NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([^']+)'")
_FIRST_POLL_S, _LONGEST_POLL_S = 0.02, 0.5
_VIEW_LAG_S = 5.0  # the gateway's view of the two records may lag behind its own response
_UNPACK_S = 30.0  # for the node to unpack the bundle, on top of the worker's startup_timeout
_LATE_STARTS = 3  # a late start is retried, since the node may have to build an image or fetch weights first


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
    on_poll: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Check | None:
    """Return the check of the active revision once it has ended; None for a revision without a check. `on_poll` is
    called at each poll.

    Raises FunctionStartFailed if the worker does not start, Conflict if another revision replaces this one, and
    TimeoutError.
    """
    if not is_pending(view):
        return view.check
    name, number = view.name, view.active
    started, poll_s = clock(), _FIRST_POLL_S
    starts = _LATE_STARTS if view.spec.get("image") or view.spec.get("weights") else 1
    limit_s = starts * startup_timeout_s + _UNPACK_S if timeout_s is None else timeout_s
    while True:
        revision = _revision(api, name, number)
        if revision is not None and revision.state is RevisionState.FAILED:
            raise _start_failed(view, revision)
        if revision is not None and (revision.check is None or revision.check.state is not CheckState.PENDING):
            return revision.check
        waited_s = clock() - started
        is_wanted = revision is not None and (revision.active or number == view.canary)
        if waited_s >= _VIEW_LAG_S and not is_wanted:
            raise Conflict(f"{name}@{number} was replaced before it was checked")
        if waited_s >= limit_s:
            raise TimeoutError(f"no worker of {name}@{number} is ready after {limit_s:g} s; see `gpufn why {name}`")
        on_poll()
        sleep(poll_s)
        poll_s = min(poll_s * 1.2, _LONGEST_POLL_S)


def _revision(api: Api, name: str, number: int) -> RevisionProgress | None:
    try:
        return api.revision(name, number)
    except RevisionNotFound:
        return None


def _start_failed(view: FunctionView, revision: RevisionProgress) -> FunctionStartFailed:
    message = f"{view.name}@{revision.number} does not start"
    if view.serving != revision.number:
        message += f", {view.name}@{view.serving} still serves"
    if revision.error is None:
        return FunctionStartFailed(message)
    line = user_line(revision.error)
    found = _NO_MODULE.search(revision.error.summary)
    remedy = (
        f"add {found[1].partition('.')[0]} to the image, Image().pip_install(...), "
        "or install it in the environment of `gpufn up`"
        if found
        else ""
    )
    return FunctionStartFailed("\n  ".join(filter(None, (f"{message}: {revision.error.summary}", line, remedy))))
