"""Current Attempt of the running code, for its output and its nested calls."""

from __future__ import annotations

from contextvars import ContextVar

from gpufn_runtime.worker.execute.attempts import Attempt

# None for the worker itself: loading, hooks, threads started by user code, and a batch of several attempts.
current_attempt: ContextVar[Attempt | None] = ContextVar("gpufn_attempt", default=None)
