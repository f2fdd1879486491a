"""Whether a runner will ever end a queued submitted call, and its outcome if not. Pure."""

from __future__ import annotations

from typing import Final

from gpufn_core.domain.invocation import END_REPORT_WITHIN_S, Outcome, OutcomeKind, deleted_error
from gpufn_core.errors import InvocationExpired
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.spec.function_spec import FunctionSpec

_DEPLOY_LAG_S: Final = 60.0  # a new revision may be unknown here for this long
_MAX_AGE_S: Final = 13 * 86400.0  # the queue silently drops messages one day later


def verdict(
    invocation: InvocationMessage, spec: FunctionSpec | None, now: float, *, delivered: int = 1
) -> Outcome | None:
    """Return the outcome of a call that must end; None while it may wait. `spec` None: its revision was deleted.

    `now` is in unix seconds. `delivered` includes the next delivery (`InvocationMessage.expires_at`).
    """
    waited_s = now - invocation.submitted_at
    if spec is None:
        if waited_s < _DEPLOY_LAG_S:
            return None
        deleted = deleted_error(f"{invocation.function}@{invocation.revision}")
        return Outcome(OutcomeKind.CANCELLED, deleted.info())
    queued_at = invocation.attempts[-1].ended_at if invocation.attempts else invocation.submitted_at
    if now - queued_at > _MAX_AGE_S or now - END_REPORT_WITHIN_S >= invocation.expires_at(
        spec.queue_timeout_s, delivered
    ):
        expired = InvocationExpired(f"the call expired after {waited_s:.1f} s in the queue; no worker took it")
        return Outcome(OutcomeKind.EXPIRED, expired.info())
    return None
