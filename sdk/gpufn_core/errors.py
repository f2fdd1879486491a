"""Errors of gpufn, as one tree with stable codes.

    GpufnError                 code, message, retryable
    ├─ RequestError            the caller can fix it
    │  ├─ InvalidSpec          InvalidInput         InvalidBundle
    │  ├─ FunctionNotFound     RevisionNotFound     InvocationNotFound   BuildNotFound   MapNotFound
    │  ├─ PayloadTooLarge      UnsupportedMediaType Conflict
    │  ├─ IdempotencyMismatch  DeadlinePassed       DeadLetterNotFound
    │  └─ Unauthorized         Forbidden            InvalidSignature     ScheduleNotFound
    ├─ FunctionRaised          the user's code raised: type, message, traceback text. Also an instance of that type if
    │  │                       the caller has the class: `except KeyError` works (gpufn_core.encoding.raised_types)
    │  └─ ResultNotEncodable   its return value cannot be encoded
    ├─ CapacityError           retry later; has retry_after_s
    │  └─ QueueFull            NoCapacity           RateLimited
    ├─ InvocationEnded         the call did not finish
    │  └─ InvocationTimedOut   InvocationCancelled  InvocationExpired
    ├─ FunctionStartFailed     its workers fail to start; the message names the function and ends with the last error
    ├─ BuildFailed             no engine could be built: stage, node, log
    └─ PlatformError           a fault of the platform
       ├─ ArtifactUnavailable  WorkerLost           DeviceFailed
       ├─ PlatformStopping     ProtocolMismatch     GatewayUnavailable
       └─ BusUnavailable
          └─ StoreFull

A class never shares its name with a builtin. `code` is sent on the wire and never changes. HTTP statuses are in
`gpufn_gateway.problems`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error on the wire.

    `error_type`, `error_bases` (the class and its bases, by name), `error_classes` (the same, as `module:name`) and
    `traceback` describe the user's exception and are set for `function_raised` only. `stage` and `node` (of the model's
    graph) are for `build_failed`.
    """

    code: str
    message: str
    retryable: bool = False
    retry_after_s: float | None = None
    field: str | None = None
    error_type: str | None = None
    error_bases: tuple[str, ...] = ()
    error_classes: tuple[str, ...] = ()
    traceback: str | None = None
    stage: str | None = None
    node: str | None = None

    @property
    def summary(self) -> str:
        """The message, prefixed with the type of the user's exception."""
        kind = self.error_type
        return f"{kind}: {self.message}" if kind and not self.message.startswith(f"{kind}:") else self.message


class GpufnError(Exception):
    """Something went wrong in gpufn."""

    code: str = "gpufn_error"
    retryable: bool = False

    def __init__(self, message: str | None = None) -> None:
        self.message = message or (type(self).__doc__ or self.code).strip().splitlines()[0]
        super().__init__(self.message)

    def info(self) -> ErrorInfo:
        """Return the error as it is sent on the wire."""
        return ErrorInfo(code=self.code, message=self.message, retryable=self.retryable)


class RequestError(GpufnError):
    """The request cannot be served as it is."""

    code = "bad_request"


class InvalidSpec(RequestError):
    """The function's options are not valid."""

    code = "invalid_spec"


class InvalidInput(RequestError):
    """The input does not fit the function's parameters."""

    code = "invalid_input"

    def __init__(self, message: str | None = None, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def info(self) -> ErrorInfo:
        return ErrorInfo(code=self.code, message=self.message, field=self.field)


class InvalidBundle(RequestError):
    """The bundle is not an archive that gpufn accepts."""

    code = "invalid_bundle"


class FunctionNotFound(RequestError):
    """There is no function of this name."""

    code = "function_not_found"


class RevisionNotFound(RequestError):
    """The function has no such revision, or its record is lost: deploy it again."""

    code = "revision_not_found"


class InvocationNotFound(RequestError):
    """There is no invocation with this id; it may have been removed after its retention."""

    code = "invocation_not_found"


class MapNotFound(RequestError):
    """There is no map with this id; maps are removed 30 days after their last item."""

    code = "map_not_found"


class BuildNotFound(RequestError):
    """There is no build with this id."""

    code = "build_not_found"


class PayloadTooLarge(RequestError):
    """The body is larger than this platform accepts."""

    code = "payload_too_large"


class UnsupportedMediaType(RequestError):
    """The body's content type is not one that the function accepts."""

    code = "unsupported_media_type"


def pickles_refused(function: str) -> str:
    """Return the message of an UnsupportedMediaType for pickled arguments."""
    return (
        f"{function} takes no pickled arguments, which run code in its workers: send plain values, or deploy it with "
        "@gpu_function(pickle=True)"
    )


class Conflict(RequestError):
    """Another request changed this at the same time."""

    code = "conflict"
    retryable = True


class IdempotencyMismatch(RequestError):
    """The key or id belongs to a call of another function, method or body: use a new one for a new call."""

    code = "idempotency_mismatch"


class DeadlinePassed(RequestError):
    """The deadline that the request names has passed."""

    code = "deadline_passed"


class DeadLetterNotFound(RequestError):
    """There is no dead letter with this id; it may have been replayed, dropped, or removed after 14 days."""

    code = "dead_letter_not_found"


class Unauthorized(RequestError):
    """A valid API key is needed: set GPUFN_API_KEY or send `Authorization: Bearer ...`."""

    code = "unauthorized"


class Forbidden(RequestError):
    """The API key's scopes do not allow this."""

    code = "forbidden"


class ScheduleNotFound(RequestError):
    """There is no schedule with this id."""

    code = "schedule_not_found"


class InvalidSignature(RequestError):
    """A webhook request was not sent by the platform."""

    code = "invalid_signature"


class FunctionRaised(GpufnError):
    """The function raised an exception."""

    code = "function_raised"

    def __init__(
        self,
        message: str | None = None,
        *,
        error_type: str = "Exception",
        traceback: str = "",
        error_classes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.traceback = traceback
        self.error_classes = error_classes

    def __str__(self) -> str:
        """Format as Python does, `ZeroDivisionError: division by zero`; `message` is without the type."""
        has_type = self.message == self.error_type or self.message.startswith(f"{self.error_type}: ")
        return self.message if has_type else f"{self.error_type}: {self.message}"

    def __repr__(self) -> str:
        """Include the type, which matters most among the results of a map or of `gather`."""
        return f"{type(self).__name__}({str(self)!r})"

    def info(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code,
            message=self.message,
            error_type=self.error_type,
            error_classes=self.error_classes,
            traceback=self.traceback or None,
        )


class ResultNotEncodable(FunctionRaised):
    """The function's return value cannot be encoded for this caller."""

    code = "result_not_encodable"

    def __str__(self) -> str:
        return self.message


class CapacityError(GpufnError):
    """There is no capacity right now."""

    code = "capacity"
    retryable = True

    def __init__(self, message: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def info(self) -> ErrorInfo:
        return ErrorInfo(code=self.code, message=self.message, retryable=True, retry_after_s=self.retry_after_s)


class QueueFull(CapacityError):
    """The function's queue is full."""

    code = "queue_full"


class RateLimited(CapacityError):
    """The API key has used up one of its limits."""

    code = "rate_limited"


class NoCapacity(CapacityError):
    """No device has room for another worker of this function."""

    code = "no_capacity"


class InvocationEnded(GpufnError):
    """The invocation ended without a result."""

    code = "invocation_ended"


class InvocationTimedOut(InvocationEnded):
    """The function did not finish within its timeout."""

    code = "invocation_timed_out"


class InvocationCancelled(InvocationEnded):
    """The invocation was cancelled."""

    code = "invocation_cancelled"


class InvocationExpired(InvocationEnded):
    """The deadline passed before a worker could take the invocation."""

    code = "invocation_expired"
    retryable = True


class FunctionStartFailed(GpufnError):
    """The function's workers fail to start."""

    code = "function_start_failed"


class BuildFailed(GpufnError):
    """No engine could be built from the model."""

    code = "build_failed"

    def __init__(self, message: str | None = None, *, stage: str = "", node: str = "", log: str = "") -> None:
        super().__init__(message)
        self.stage = stage
        self.node = node
        self.log = log

    def info(self) -> ErrorInfo:
        """Return the error for the wire. `log`, the last output of the compiler, is sent as the traceback."""
        return ErrorInfo(
            code=self.code,
            message=self.message,
            stage=self.stage or None,
            node=self.node or None,
            traceback=self.log or None,
        )


class PlatformError(GpufnError):
    """The platform failed."""

    code = "platform_error"
    retryable = True


class BusUnavailable(PlatformError):
    """The message bus does not respond."""

    code = "bus_unavailable"


class StoreFull(BusUnavailable):
    """The disk of the message bus is full: nothing can be stored until there is room."""

    code = "store_full"


class ArtifactUnavailable(PlatformError):
    """A bundle, model or engine could not be fetched completely."""

    code = "artifact_unavailable"


class WorkerLost(PlatformError):
    """The worker died while it ran this invocation."""

    code = "worker_lost"


class DeviceFailed(PlatformError):
    """The device failed."""

    code = "device_failed"


class PlatformStopping(PlatformError):
    """The platform, or the node of this call, is stopping. The call can be retried."""

    code = "platform_stopping"


class ProtocolMismatch(PlatformError):
    """Two processes run incompatible releases of gpufn."""

    code = "protocol_mismatch"
    retryable = False


class GatewayUnavailable(PlatformError):
    """The gateway cannot be reached, or stopped before it could answer."""

    code = "gateway_unavailable"


class DeployedCodeDiffers(UserWarning):
    """The deployed code of a call differs from the code in the local file that declares the function."""


def _tree(root: type[GpufnError]) -> dict[str, type[GpufnError]]:
    tree = {root.code: root}
    for child in root.__subclasses__():
        tree |= _tree(child)
    return tree


BY_CODE: dict[str, type[GpufnError]] = _tree(GpufnError)

for _error in {*BY_CODE.values(), DeployedCodeDiffers}:
    _error.__module__ = "gpufn.errors"  # tracebacks and pickles name the public module


def error_from(info: ErrorInfo) -> GpufnError:
    """Build the exception that `info` describes. An unknown code becomes a plain `GpufnError` with that code."""
    cls = BY_CODE.get(info.code, GpufnError)
    fields: dict[str, Any] = {}
    if issubclass(cls, FunctionRaised):
        fields = {
            "error_type": info.error_type or "Exception",
            "traceback": info.traceback or "",
            "error_classes": info.error_classes,
        }
    elif issubclass(cls, CapacityError):
        fields = {"retry_after_s": info.retry_after_s}
    elif issubclass(cls, BuildFailed):
        fields = {"stage": info.stage or "", "node": info.node or "", "log": info.traceback or ""}
    elif issubclass(cls, InvalidInput):
        fields = {"field": info.field}
    error = cls(info.message, **fields)
    error.code, error.retryable = info.code or cls.code, info.retryable
    return error
