"""What an open circuit tells callers: the gateway's, and the runner's for calls that functions make of each other.
Pure."""

from __future__ import annotations

from gpufn.errors import ErrorInfo, FunctionStartFailed
from gpufn.protocol.reports import FunctionStatus

# The controller tries a function that cannot start again after a while; asking more often learns nothing.
_CIRCUIT_RETRY_S = 15.0


class Refused(FunctionStartFailed):
    """The function's workers fail to start."""

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, retry_after_s=_CIRCUIT_RETRY_S)


def start_failure(revision: int, status: FunctionStatus) -> Refused | None:
    """Set while the circuit of this very revision is open and nobody else serves it."""
    if status.start_error is None or status.serving != revision or status.workers.ready:
        return None
    name, error = status.function, status.start_error
    where = f" (`gpufn logs {name}` has the traceback)" if error.traceback else ""
    return Refused(f"{name} cannot start: {error.summary}{where}")
