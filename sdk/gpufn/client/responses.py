"""Decoding of gateway responses: results, JSON documents, and problems, which become exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gpufn.client.views import Problem, RawResult
from gpufn_core.errors import ErrorInfo, GpufnError, PayloadTooLarge, ProtocolMismatch, error_from

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

_TOO_LARGE = "pass a path or URL that the other side can read, or split the data over several calls"


def raw_result_of(response: httpx.Response) -> RawResult:
    headers = response.headers
    return RawResult(
        content_type=headers.get("content-type", ""),
        body=response.content,
        invocation=headers.get("x-gpufn-invocation", ""),
        revision=headers.get("x-gpufn-revision", ""),
        timings=dict(_timings(headers.get("server-timing", ""))),
    )


def _timings(header: str) -> Iterator[tuple[str, float]]:
    for part in header.split(","):
        phase, _, duration = part.strip().partition(";dur=")
        with contextlib.suppress(ValueError):
            yield phase, float(duration)


def decode(kind: type[T], data: bytes) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolMismatch(
            f"cannot decode the gateway's response; it may run another release of gpufn: {error}"
        ) from error


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> GpufnError:
    """Return the exception that a problem describes; its `status` is the HTTP status."""
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except msgspec.MsgspecError:
        problem = Problem(detail=body[:200].decode(errors="replace").strip())
    if not problem.code and not body:
        problem = Problem(detail=f"the gateway returned {status}")
    retry_after = problem.retry_after_s
    if retry_after is None:
        with contextlib.suppress(ValueError):
            retry_after = float(headers.get("retry-after", ""))
    error = _exception_of(problem, retry_after)
    error.status = status  # type: ignore[attr-defined]
    return error


def _exception_of(problem: Problem, retry_after_s: float | None) -> GpufnError:
    message = problem.detail or problem.title
    if problem.code == PayloadTooLarge.code:
        message = f"{message.rstrip('.')}: {_TOO_LARGE}"
    return error_from(
        ErrorInfo(
            code=problem.code,
            message=message,
            retryable=problem.retryable,
            retry_after_s=retry_after_s,
            field=problem.field,
            error_type=problem.error_type,
            error_classes=problem.error_classes,
            traceback=problem.traceback,
            stage=problem.stage,
            node=problem.node,
        )
    )
