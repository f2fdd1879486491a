"""Errors of gpufn, as one tree with stable codes.

    GpufnError                 code, message, retryable
    ├─ RequestError            the caller can fix it
    │  ├─ InvalidSpec          InvalidInput         InvalidBundle
    │  ├─ FunctionNotFound     RevisionNotFound     InvocationNotFound   BuildNotFound   MapNotFound
    │  ├─ AmbiguousFunction
    │  ├─ PayloadTooLarge      UnsupportedMediaType Conflict
    │  ├─ IdempotencyMismatch  DeadlinePassed       DeadLetterNotFound
    │  ├─ Unauthorized         Forbidden            InvalidSignature     ScheduleNotFound
    │  └─ SecretNotFound       SignerNotFound       UntrustedDeploy      DataNotFound        TraceNotFound
    ├─ FunctionRaised          the user's code raised: type, message, traceback text. Also an instance of that type if
    │  │                       the caller has the class: `except KeyError` works (gpufn_core.encoding.raised_types)
    │  └─ ResultNotEncodable   its return value cannot be encoded
    ├─ CapacityError           retry later; has retry_after_s
    │  └─ QueueFull            NoCapacity           RateLimited          TooManyVariants
    ├─ InvocationEnded         the call did not finish
    │  └─ InvocationTimedOut   InvocationCancelled  InvocationExpired
    ├─ FunctionStartFailed     its workers fail to start; the message names the function and ends with the last error
    ├─ BuildFailed             no engine could be built: stage, node, log
    └─ PlatformError           a fault of the platform
       ├─ ArtifactUnavailable  WorkerLost           DeviceFailed
       ├─ PlatformStopping     ProtocolMismatch     GatewayUnavailable
       ├─ AuditLogUnavailable  IssuerUnavailable    HistoryUnavailable
       └─ BusUnavailable
          └─ StoreFull

The text of an error is the first line of its class's docstring, unless the code that raises it passes a better one. The
exception of a user's function gets its text in `gpufn_runtime.worker.execute.error_report`.

A class never shares its name with a builtin. `code` is sent on the wire and never changes. `gpufn_gateway.problems` has
the HTTP statuses, and hides the texts of internal faults from callers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

_UNSET = (None, "", ())  # values of details that an error does not have


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
    """An error of gpufn; its subclasses are more specific."""

    code: str = "gpufn_error"
    retryable: bool = False
    _details: ClassVar[Mapping[str, str]] = {}  # attribute → field of ErrorInfo that has it

    def __init_subclass__(cls, *, code: str | None = None, retryable: bool | None = None) -> None:
        super().__init_subclass__()
        if code is not None:
            cls.code = code
        if retryable is not None:
            cls.retryable = retryable

    def __init__(self, message: str | None = None) -> None:
        self.message = message or (type(self).__doc__ or self.code).strip().splitlines()[0]
        super().__init__(self.message)

    def info(self) -> ErrorInfo:
        """Return the error as it is sent on the wire."""
        values: dict[str, Any] = {field: getattr(self, name) for name, field in self._details.items()}
        details = {field: value for field, value in values.items() if value not in _UNSET}
        return ErrorInfo(code=self.code, message=self.message, retryable=self.retryable, **details)


class RequestError(GpufnError, code="bad_request"):
    """The request cannot be served as it is."""


class InvalidSpec(RequestError, code="invalid_spec"):
    """The function's options are not valid."""


class InvalidInput(RequestError, code="invalid_input"):
    """The input does not fit the function's parameters."""

    _details: ClassVar = {"field": "field"}

    def __init__(self, message: str | None = None, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidBundle(RequestError, code="invalid_bundle"):
    """The bundle is not an archive that gpufn accepts."""


class FunctionNotFound(RequestError, code="function_not_found"):
    """There is no function of this name."""


class AmbiguousFunction(RequestError, code="function_ambiguous"):
    """Several functions have this name: write the environment and the app, as in `prod/search/predict`."""


class RevisionNotFound(RequestError, code="revision_not_found"):
    """The function has no such revision, or its record is lost: deploy it again."""


class InvocationNotFound(RequestError, code="invocation_not_found"):
    """There is no invocation with this id; it may have been removed after its retention."""


class TraceNotFound(RequestError, code="trace_not_found"):
    """There is no trace with this id, and no call that was traced: gateways keep the last traces in memory."""


class MapNotFound(RequestError, code="map_not_found"):
    """There is no map with this id; maps are removed 30 days after their last item."""


class BuildNotFound(RequestError, code="build_not_found"):
    """There is no build with this id."""


class PayloadTooLarge(RequestError, code="payload_too_large"):
    """The body is larger than this platform accepts."""


class UnsupportedMediaType(RequestError, code="unsupported_media_type"):
    """The function does not accept the body's content type."""


def pickles_refused(function: str) -> str:
    """Return the message of an UnsupportedMediaType for pickled arguments."""
    return (
        f"{function} takes no pickled arguments, which run code in its workers: send plain values, or deploy it with "
        "@gpu_function(pickle=True)"
    )


class Conflict(RequestError, code="conflict", retryable=True):
    """Another request changed this at the same time."""

    _details: ClassVar = {"field": "field"}

    def __init__(self, message: str | None = None, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class IdempotencyMismatch(RequestError, code="idempotency_mismatch"):
    """The key or id belongs to a call of another function, method or body: use a new one for a new call."""


class DeadlinePassed(RequestError, code="deadline_passed"):
    """The deadline that the request names has passed."""


class DeadLetterNotFound(RequestError, code="dead_letter_not_found"):
    """There is no dead letter with this id; it may have been replayed, dropped, or removed after 14 days."""


class Unauthorized(RequestError, code="unauthorized"):
    """A valid API key or token is needed: set GPUFN_API_KEY, run `gpufn login`, or send `Authorization: Bearer ...`."""


class Forbidden(RequestError, code="forbidden"):
    """The scopes of the API key or token do not allow this."""


class ScheduleNotFound(RequestError, code="schedule_not_found"):
    """There is no schedule with this id."""


class SecretNotFound(RequestError, code="secret_not_found"):
    """There is no secret with this name: set it with `gpufn secrets set NAME`."""


class DataNotFound(RequestError, code="data_not_found"):
    """There is no volume, dict, queue, stored value or region of shared memory of this name."""


class SignerNotFound(RequestError, code="signer_not_found"):
    """There is no trusted key with this name."""


class UntrustedDeploy(RequestError, code="untrusted_deploy"):
    """The deploy has no valid signature of a key that is trusted for the function."""


class InvalidSignature(RequestError, code="invalid_signature"):
    """A webhook request was not sent by the platform."""


class FunctionRaised(GpufnError, code="function_raised"):
    """The function raised an exception."""

    _details: ClassVar = {name: name for name in ("error_type", "traceback", "error_classes")}

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


class ResultNotEncodable(FunctionRaised, code="result_not_encodable"):
    """The function's return value cannot be encoded for this caller."""

    def __str__(self) -> str:
        return self.message


class CapacityError(GpufnError, code="capacity", retryable=True):
    """There is no capacity right now."""

    _details: ClassVar = {"retry_after_s": "retry_after_s"}

    def __init__(self, message: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(CapacityError, code="queue_full"):
    """The function's queue is full."""


class TooManyVariants(CapacityError, code="too_many_variants"):
    """The function has as many variants as its max_variants allows."""


class RateLimited(CapacityError, code="rate_limited"):
    """The API key has used up one of its limits."""


class NoCapacity(CapacityError, code="no_capacity"):
    """No device has room for another worker of this function."""


class InvocationEnded(GpufnError, code="invocation_ended"):
    """The invocation ended without a result."""


class InvocationTimedOut(InvocationEnded, code="invocation_timed_out"):
    """The function did not finish within its timeout."""


class InvocationCancelled(InvocationEnded, code="invocation_cancelled"):
    """The invocation was cancelled."""


class InvocationExpired(InvocationEnded, code="invocation_expired", retryable=True):
    """The deadline passed before a worker could take the invocation."""


class FunctionStartFailed(GpufnError, code="function_start_failed"):
    """The function's workers fail to start."""


class BuildFailed(GpufnError, code="build_failed"):
    """No engine could be built from the model."""

    _details: ClassVar = {"stage": "stage", "node": "node", "log": "traceback"}  # `log`: the compiler's last output

    def __init__(self, message: str | None = None, *, stage: str = "", node: str = "", log: str = "") -> None:
        super().__init__(message)
        self.stage = stage
        self.node = node
        self.log = log


class PlatformError(GpufnError, code="platform_error", retryable=True):
    """The platform failed."""


class BusUnavailable(PlatformError, code="bus_unavailable"):
    """The message bus does not respond."""


class StoreFull(BusUnavailable, code="store_full"):
    """The disk of the message bus is full: nothing can be stored until there is room."""


class AuditLogUnavailable(PlatformError, code="audit_log_unavailable"):
    """The audit log cannot be written, so nothing may be changed: check the message bus and its disk."""


class ArtifactUnavailable(PlatformError, code="artifact_unavailable"):
    """A bundle, model or engine could not be fetched completely."""


class WorkerLost(PlatformError, code="worker_lost"):
    """The worker died while it ran this invocation."""


class DeviceFailed(PlatformError, code="device_failed"):
    """The device failed."""


class PlatformStopping(PlatformError, code="platform_stopping"):
    """The platform, or the node of this call, is stopping. The call can be retried."""


class ProtocolMismatch(PlatformError, code="protocol_mismatch", retryable=False):
    """Two processes run incompatible releases of gpufn."""


class IssuerUnavailable(PlatformError, code="issuer_unavailable"):
    """The gateway cannot read the signing keys of the identity provider now."""


class HistoryUnavailable(PlatformError, code="history_unavailable"):
    """The gateway cannot read the history now. It loads the history after its start."""


class GatewayUnavailable(PlatformError, code="gateway_unavailable"):
    """The gateway cannot be reached, or stopped before it could answer."""


class DeployedCodeDiffers(UserWarning):
    """The deployed code of a call differs from the code in the local file that declares the function."""


_CLASSES = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, GpufnError)]
BY_CODE: dict[str, type[GpufnError]] = {kind.code: kind for kind in _CLASSES}

for _error in {*BY_CODE.values(), DeployedCodeDiffers}:
    _error.__module__ = "gpufn.errors"  # tracebacks and pickles name the public module


def error_from(info: ErrorInfo) -> GpufnError:
    """Build the exception that `info` describes. An unknown code becomes a plain `GpufnError` with that code."""
    cls = BY_CODE.get(info.code, GpufnError)
    fields: dict[str, Any] = {name: getattr(info, field) for name, field in cls._details.items()}
    error = cls(info.message, **{name: value for name, value in fields.items() if value not in _UNSET})
    error.code, error.retryable = info.code or cls.code, info.retryable
    return error
