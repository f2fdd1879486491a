"""Which Attempt the code that runs right now belongs to: for its prints and its nested calls."""

from __future__ import annotations

from contextvars import ContextVar

from gpufn_runtime.worker.execute.attempts import Attempt

# None is the worker itself: its loading, its hooks, threads of the user's own, a batch of several attempts.
current_attempt: ContextVar[Attempt | None] = ContextVar("gpufn_attempt", default=None)
