"""Whether a submitted call that waits in its queue will ever be ended by a runner, and how it ends if not. Pure."""

from __future__ import annotations

from typing import Final

from gpufn_core.domain.invocation import WORD_WITHIN_S, Outcome, OutcomeKind, was_deleted
from gpufn_core.errors import InvocationExpired
from gpufn_core.protocol.messages import InvocationMessage
from gpufn_core.spec.function_spec import FunctionSpec

_DEPLOYED_S: Final = 60.0  # sooner it may not be known here yet
_OLDEST_S: Final = 13 * 86400.0  # a day later the queue would drop it without a word


def verdict(
    invocation: InvocationMessage, spec: FunctionSpec | None, now: float, *, delivered: int = 1
) -> Outcome | None:
    """How it ends; None while it may wait. `spec` None: its function or revision is gone. `now` in unix seconds.
    `delivered` counts with the delivery to come (`InvocationMessage.expires_at`)."""
    waited_s = now - invocation.submitted_at
    if spec is None:
        if waited_s < _DEPLOYED_S:
            return None
        gone = was_deleted(f"{invocation.function}@{invocation.revision}")
        return Outcome(OutcomeKind.CANCELLED, gone.info())
    queued_at = invocation.attempts[-1].ended_at if invocation.attempts else invocation.submitted_at  # in its place
    if now - queued_at > _OLDEST_S or now - WORD_WITHIN_S >= invocation.expires_at(spec.queue_timeout_s, delivered):
        late = InvocationExpired(f"{waited_s:.1f} s in the queue were too long, and no worker took it")
        return Outcome(OutcomeKind.EXPIRED, late.info())
    return None
