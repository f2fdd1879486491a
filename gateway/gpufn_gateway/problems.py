"""Errors as HTTP responses: RFC 9457 problem details with a stable `code`. Only this module maps errors to statuses."""

from __future__ import annotations

import http
import logging
import math
import re
from typing import Any

import msgspec

from gpufn_core import errors
from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.errors import ErrorInfo, GpufnError, PlatformError
from gpufn_core.ids import new_ulid
from gpufn_gateway.http import request_id
from gpufn_platform.bus.connection import JetStreamError, NotStored

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]

_ERRORS_BY_STATUS: dict[int, tuple[type[GpufnError], ...]] = {
    400: (errors.RequestError,),
    401: (errors.Unauthorized, errors.InvalidSignature),
    403: (errors.Forbidden, errors.UntrustedDeploy),
    404: (
        errors.FunctionNotFound,
        errors.RevisionNotFound,
        errors.InvocationNotFound,
        errors.MapNotFound,
        errors.TraceNotFound,
        errors.BuildNotFound,
        errors.ScheduleNotFound,
        errors.DeadLetterNotFound,
        errors.SecretNotFound,
        errors.SignerNotFound,
        errors.DataNotFound,
    ),
    409: (errors.Conflict, errors.AmbiguousFunction, errors.IdempotencyMismatch, errors.InvocationCancelled),
    413: (errors.PayloadTooLarge,),
    415: (errors.UnsupportedMediaType,),
    422: (errors.InvalidSpec, errors.InvalidInput, errors.InvalidBundle, errors.BuildFailed),
    429: (errors.QueueFull, errors.RateLimited, errors.TooManyVariants),
    500: (errors.FunctionRaised, errors.InvocationEnded, errors.PlatformError),
    502: (errors.WorkerLost, errors.DeviceFailed),
    503: (
        errors.CapacityError,
        errors.FunctionStartFailed,
        errors.BusUnavailable,
        errors.ArtifactUnavailable,
        errors.AuditLogUnavailable,
        errors.IssuerUnavailable,
        errors.HistoryUnavailable,
        errors.PlatformStopping,
        errors.GatewayUnavailable,
    ),
    504: (errors.InvocationTimedOut, errors.InvocationExpired),
}
_STATUS_BY_ERROR = {error: status for status, kinds in _ERRORS_BY_STATUS.items() for error in kinds}
# Retry-After if the error has no value.
_RETRY_AFTER_S: dict[int, float] = {429: 1.0, 503: 1.0}

# For an attempt that ended without an error record.
_ERROR_BY_OUTCOME: dict[OutcomeKind, type[GpufnError]] = {
    OutcomeKind.RAISED: errors.FunctionRaised,
    OutcomeKind.REJECTED: errors.InvalidInput,
    OutcomeKind.TIMED_OUT: errors.InvocationTimedOut,
    OutcomeKind.CANCELLED: errors.InvocationCancelled,
    OutcomeKind.EXPIRED: errors.InvocationExpired,
    OutcomeKind.LOST: errors.WorkerLost,
    OutcomeKind.NOT_STARTED: errors.FunctionStartFailed,
}
_ERROR_BY_STATE: dict[InvocationState, type[GpufnError]] = {
    InvocationState.CANCELLED: errors.InvocationCancelled,
    InvocationState.TIMED_OUT: errors.InvocationTimedOut,
    InvocationState.EXPIRED: errors.InvocationExpired,
    InvocationState.FAILED: errors.InvocationEnded,
}


_INTERNAL_NAMES = re.compile(r"gpufn\.v1|\$JS|\$KV|\$O\.|_INBOX|\bKV_|\bOBJ_|\bGPUFN_[A-Z]+\b|gpufn_[a-z]+/")


class RouteError(errors.RequestError):
    """An HTTP error with its own status: no such route, method not allowed, body too slow."""

    def __init__(self, status: int, message: str | None = None, *, allow: str = "") -> None:
        super().__init__(message or http.HTTPStatus(status).phrase)
        self.status = status
        self.allow = allow


class KeyLimitExceeded(errors.RateLimited):
    """RateLimited, with the RateLimit header fields of the API key."""

    def __init__(self, message: str, retry_after_s: float, headers: Headers) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = headers


class Problem(msgspec.Struct, frozen=True):
    """An error, ready to be sent.

    `allow` lists the allowed methods for a 405. `rate_limit_headers` are the RateLimit header fields of a key over its
    limit. `request_id` is empty for the outcome of a call, which is the same for every request.
    """

    status: int
    info: ErrorInfo
    allow: str = ""
    rate_limit_headers: Headers = []
    request_id: str = ""

    @property
    def code(self) -> str:
        return self.info.code

    def body(self) -> bytes:
        info = self.info
        fields: dict[str, Any] = {
            "type": "about:blank",
            "title": http.HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": info.message,
            "code": info.code,
            "retryable": info.retryable,
        }
        for name in ("retry_after_s", "field", "error_type", "traceback", "stage", "node"):
            if (value := getattr(info, name)) is not None:
                fields[name] = value
        if self.request_id:
            fields["request_id"] = self.request_id
        if info.error_classes:
            fields["error_classes"] = info.error_classes
        return msgspec.json.encode(fields)

    def headers(self) -> Headers:
        """The response headers, without Content-Length. An unread body (408, 413) closes the connection."""
        headers: Headers = [(b"content-type", b"application/problem+json")]
        retry_after_s = self.info.retry_after_s or _RETRY_AFTER_S.get(self.status)
        if retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(retry_after_s))))
        if self.allow:
            headers.append((b"allow", self.allow.encode()))
        headers += self.rate_limit_headers
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.status in (408, 413):
            headers.append((b"connection", b"close"))
        return headers


class CallFailed(GpufnError):
    """A call that ended with a problem, for an adapter. `headers` describe the call."""

    def __init__(self, problem: Problem, headers: Headers) -> None:
        super().__init__(problem.info.message)
        self.problem = problem
        self.headers = headers


def problem_of(error: BaseException) -> Problem:
    """Convert any exception of a request. An unexpected error is logged with an incident id, and the client sees only
    that id."""
    return msgspec.structs.replace(_problem_of(error), request_id=request_id.current.get())


def _problem_of(error: BaseException) -> Problem:
    if isinstance(error, RouteError):
        return Problem(error.status, error.info(), error.allow)
    if isinstance(error, CallFailed):
        return error.problem
    if isinstance(error, KeyLimitExceeded):
        return msgspec.structs.replace(from_info(error.info()), rate_limit_headers=error.headers)
    if not isinstance(error, GpufnError):
        incident = new_ulid()
        log.error("incident %s", incident, exc_info=error)
        return Problem(500, _platform_error(f"The platform failed. The gateway's log has the details of {incident}."))
    return from_info(_public(error))


def from_info(info: ErrorInfo) -> Problem:
    """Convert an error that came over the bus. An unknown code gets status 500."""
    kind: type[GpufnError] = errors.BY_CODE.get(info.code, GpufnError)
    return Problem(next((_STATUS_BY_ERROR[base] for base in kind.__mro__ if base in _STATUS_BY_ERROR), 500), info)


def from_outcome(kind: OutcomeKind, error: ErrorInfo | None) -> Problem:
    return from_info(error or _ERROR_BY_OUTCOME[kind]().info())


def from_state(state: InvocationState, error: ErrorInfo | None) -> Problem:
    return from_info(error or _ERROR_BY_STATE[state]().info())


def _public(error: GpufnError) -> ErrorInfo:
    """Hide the names of subjects, streams and buckets, and the address of the bus, from clients."""
    if isinstance(error, JetStreamError):
        log.warning("the bus refused a request: %s", error)
        return _platform_error("The platform failed: its message bus refused a request.")
    if isinstance(error, errors.BusUnavailable) and not isinstance(error, errors.StoreFull):
        log.warning("the bus was not available: %s", error)
        message = "The message bus does not respond right now; a call in flight may have run."
        if isinstance(error, NotStored):
            message = "The message bus did not confirm this write in time; it may still store it. Its disk may be full."
        return ErrorInfo(errors.BusUnavailable.code, message, retryable=True)
    info = error.info()
    if _INTERNAL_NAMES.search(info.message):
        log.warning("a request failed: %s", error)
        return msgspec.structs.replace(info, message=type(error)().message)
    return info


def _platform_error(message: str) -> ErrorInfo:
    return ErrorInfo(PlatformError.code, message, retryable=True)
