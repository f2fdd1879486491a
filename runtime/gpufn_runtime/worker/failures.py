"""A user's exception as an ErrorInfo: its own frames only, no path of ours, and of bounded size."""

from __future__ import annotations

import os
import traceback

import gpufn.errors
from gpufn.errors import ErrorInfo

_MAX_MESSAGE = 16 << 10
_MAX_TRACEBACK = 64 << 10  # of the frame header's 1 MiB
_OURS = (
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.path.abspath(gpufn.errors.__file__)) + os.sep,
    "<frozen importlib",
)


def describe(error: BaseException, bundle_dir: str = "", code: str = "function_raised") -> ErrorInfo:
    """What the caller is told of `error`. File names in the bundle are relative to it."""
    kind = type(error)
    return ErrorInfo(
        code=code,
        message=_bounded(_message(error), _MAX_MESSAGE),
        error_type=kind.__qualname__,
        error_bases=tuple(base.__qualname__ for base in kind.__mro__ if base not in (BaseException, object)),
        traceback=_bounded(_traceback(error, bundle_dir), _MAX_TRACEBACK),
    )


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        return f"<{type(error).__qualname__} whose text could not be made>"
    return text or type(error).__qualname__


def _traceback(error: BaseException, bundle_dir: str) -> str:
    try:
        described = traceback.TracebackException.from_exception(error, compact=True)
        _trim(described)
        text = "".join(described.format())
    except Exception as failure:  # a __repr__, a __notes__ or a source file of the user's
        return f"{type(error).__qualname__}\n(the traceback could not be made: {type(failure).__qualname__})\n"
    return text.replace(bundle_dir.rstrip(os.sep) + os.sep, "") if bundle_dir else text


def _trim(described: traceback.TracebackException) -> None:
    kept = [frame for frame in described.stack if not frame.filename.startswith(_OURS)]
    described.stack = traceback.StackSummary.from_list(kept)
    for inner in (described.__cause__, described.__context__, *(described.exceptions or ())):
        if inner is not None:
            _trim(inner)


def _bounded(text: str, most: int) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot travel
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n... {len(text) - most} characters left out ...\n{text[-most // 2 :]}"
