"""Errors of calls to a function whose circuit breaker is open: for callers of the gateway, and for calls between
functions, which the runner answers. Pure."""

from __future__ import annotations

import re

import msgspec

from gpufn_core.errors import ErrorInfo, FunctionStartFailed
from gpufn_core.protocol.reports import FunctionStatus

# The controller retries a function that cannot start after a while; a caller that retries sooner gains nothing.
_CIRCUIT_RETRY_S = 15.0


_FRAME = re.compile(
    r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+)[^\n]*(?:\n {4,}(?P<text>\S[^\n]*))?', re.MULTILINE
)


def user_line(error: ErrorInfo) -> str:
    """Return the line of user code that failed, such as ``app.py, line 3: model = load()``; "" without a traceback.

    The files of a bundle have relative names. If the traceback has none, return its last line.
    """
    frames = list(_FRAME.finditer(error.traceback or ""))
    own = [frame for frame in frames if not frame["file"].startswith(("/", "<"))]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    return f"{frame['file']}, line {frame['line']}" + (f": {frame['text']}" if frame["text"] else "")


class Refused(FunctionStartFailed):
    """The function's workers fail to start."""

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, retry_after_s=_CIRCUIT_RETRY_S)


def start_failure(revision: int, status: FunctionStatus) -> Refused | None:
    """Return an error while the circuit breaker of this revision is open and the revision has no ready worker."""
    if status.start_error is None or status.serving != revision or status.workers.ready:
        return None
    return Refused(caller_error(status.function, status.start_error).message)


def caller_error(function: str, error: ErrorInfo) -> ErrorInfo:
    """Return a start failure as a caller receives it. The message names the function, and includes the type of the
    user's exception, without which a `KeyError` is only a quoted word. The type fields are empty, because no call of
    the function raised it."""
    where = f" (`gpufn logs {function}` has the traceback)" if error.traceback else ""
    message = f"{function} cannot start: {error.summary}{where}"
    return msgspec.structs.replace(error, message=message, error_type=None, error_bases=())
