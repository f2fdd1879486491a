"""The retry policy of a function: whether the outcome of an attempt is worth another attempt.

The runner's `core/end_rules.py` decides first whether the platform itself repeats the call, for example after a GPU
failed. Such a start uses up no retry.
"""

from __future__ import annotations

import enum
import math

from gpufn_core.domain.invocation import Outcome, OutcomeKind
from gpufn_core.spec.function_spec import Retry

_RETRYABLE = frozenset({OutcomeKind.RAISED, OutcomeKind.TIMED_OUT, OutcomeKind.LOST})


class Settlement(enum.StrEnum):
    """How a runner settles a delivery. A retry is a new message, so that its attempt is counted."""

    ACK = "ack"
    RETRY = "retry"


def settlement_for(outcome: Outcome, retries: Retry | None, retried: int, *, left_s: float = math.inf) -> Settlement:
    """Apply the retry policy to an outcome.

    `retried` retries of the policy were used; starts repeated after a fault of the platform do not count. `left_s` is
    the time until the deadline. A retry must start before it: otherwise it would expire in the queue and hide this
    outcome.
    """
    if outcome.kind not in _RETRYABLE or retries is None or retried >= retries.attempts:
        return Settlement.ACK
    if retries.delay_before(retried + 2) >= left_s:
        return Settlement.ACK
    if outcome.kind is OutcomeKind.RAISED and retries.on:
        raised = outcome.error.error_bases if outcome.error else ()
        if not set(raised) & set(retries.on):
            return Settlement.ACK
    return Settlement.RETRY
