"""Convert a user's exception to an ErrorInfo, with the user's own stack frames and no platform paths. The size of error
reports is limited: names and texts in them come from users or callers and may have any length."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import msgspec

import gpufn
import gpufn_core
import gpufn_runtime.worker
from gpufn_core.encoding.raised_types import classes_of
from gpufn_core.errors import ErrorInfo, RequestError

_MAX_MESSAGE = 16 << 10
_MAX_TRACEBACK = 64 << 10  # a frame header has at most 1 MiB
_MAX_NAME = 256
_MAX_BASES = 64
_PLATFORM_PATHS = (
    *(
        os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep
        for package in (gpufn, gpufn_core, gpufn_runtime.worker)
    ),
    "<frozen importlib",
)


class Rejected(Exception):
    """The platform found during a run that the caller's input is invalid: a model rejected its values."""

    def __init__(self, reason: RequestError) -> None:
        super().__init__(reason.message)
        self.reason = reason


def unchanged(text: str) -> str:
    return text


def describe(
    error: BaseException,
    bundle_dir: str = "",
    code: str = "function_raised",
    redact: Callable[[str], str] = unchanged,
) -> ErrorInfo:
    """Return the report of `error` for the caller. File names in the bundle are relative to it. `redact` masks
    secrets."""
    kind = type(error)
    return bounded(
        ErrorInfo(
            code=code,
            message=message_of(error),
            error_type=kind.__qualname__,
            error_bases=tuple(base.__qualname__ for base in kind.__mro__ if base not in (BaseException, object)),
            error_classes=classes_of(kind),
            traceback=_traceback(error, bundle_dir),
        ),
        redact,
    )


def bounded(info: ErrorInfo, redact: Callable[[str], str] = unchanged) -> ErrorInfo:
    """Mask secrets in `info`, then truncate it so that it fits into a frame's header."""
    return msgspec.structs.replace(
        info,
        message=_bounded(redact(info.message), _MAX_MESSAGE),
        field=info.field and _bounded(info.field, _MAX_NAME),
        error_type=info.error_type and _bounded(info.error_type, _MAX_NAME),
        error_bases=tuple(_bounded(base, _MAX_NAME) for base in info.error_bases[:_MAX_BASES]),
        error_classes=tuple(_bounded(base, _MAX_NAME) for base in info.error_classes[:_MAX_BASES]),
        traceback=info.traceback and _bounded(redact(info.traceback), _MAX_TRACEBACK),
    )


def message_of(error: BaseException) -> str:
    """Return the exception's text, which is produced by user code."""
    try:
        text = str(error)
    except BaseException:
        return f"<{type(error).__qualname__}, whose str() failed>"
    return text or type(error).__qualname__


def _traceback(error: BaseException, bundle_dir: str) -> str:
    try:
        report = traceback.TracebackException.from_exception(error, compact=True)
        _trim(report)
        text = "".join(report.format())
    except BaseException as failure:  # from a user's __repr__, __notes__ or source file
        return f"{type(error).__qualname__}\n(formatting the traceback failed: {type(failure).__qualname__})\n"
    return text.replace(bundle_dir.rstrip(os.sep) + os.sep, "") if bundle_dir else text


def _trim(report: traceback.TracebackException) -> None:
    user_frames = [frame for frame in report.stack if not frame.filename.startswith(_PLATFORM_PATHS)]
    report.stack = traceback.StackSummary.from_list(user_frames)
    for inner in (report.__cause__, report.__context__, *(report.exceptions or ())):
        if inner is not None:
            _trim(inner)


def _bounded(text: str, most: int) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be encoded
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n... {len(text) - most} characters left out ...\n{text[-most // 2 :]}"
