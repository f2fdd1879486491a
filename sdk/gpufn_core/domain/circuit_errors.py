"""What an open circuit tells callers, the gateway's and the runner's for calls that functions make of each other.
Pure."""

from __future__ import annotations

import re

import msgspec

from gpufn_core.errors import ErrorInfo, FunctionStartFailed
from gpufn_core.protocol.reports import FunctionStatus

# The controller tries a function that cannot start again after a while; asking more often learns nothing.
_CIRCUIT_RETRY_S = 15.0


_FRAME = re.compile(
    r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+)[^\n]*(?:\n {4,}(?P<text>\S[^\n]*))?', re.MULTILINE
)


def user_line(error: ErrorInfo) -> str:
    """The line of the user's code that failed, such as ``app.py, line 3: model = load()``; "" without a traceback.

    The files of a bundle have relative names. Where none is in the traceback the last line of all stands.
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
    """Set while the circuit of this very revision is open and nobody else serves it."""
    if status.start_error is None or status.serving != revision or status.workers.ready:
        return None
    return Refused(told(status.function, status.start_error).message)


def told(function: str, error: ErrorInfo) -> ErrorInfo:
    """A start's error as its caller hears it: of which function it is, and the user's exception with its type, without
    which a `KeyError` is a word in quotes. The type stands in the words alone: no call of the function raised it."""
    where = f" (`gpufn logs {function}` has the traceback)" if error.traceback else ""
    message = f"{function} cannot start: {error.summary}{where}"
    return msgspec.structs.replace(error, message=message, error_type=None, error_bases=())
