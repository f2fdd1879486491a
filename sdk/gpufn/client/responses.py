"""Decoding of gateway responses: results, JSON documents, and problems, which become exceptions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gpufn.client.views.calls import RawResult
from gpufn.client.views.problem import Problem
from gpufn_core.errors import GpufnError, PayloadTooLarge, ProtocolMismatch, error_from

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
        problem = Problem(message=body[:200].decode(errors="replace").strip())
    if not problem.code and not body:
        problem = Problem(message=f"the gateway returned {status}")
    message, retry_after_s = problem.message or problem.title, problem.retry_after_s
    if problem.code == PayloadTooLarge.code:
        message = f"{message.rstrip('.')}: {_TOO_LARGE}"
    if retry_after_s is None:
        with contextlib.suppress(ValueError):
            retry_after_s = float(headers.get("retry-after", ""))
    error = error_from(msgspec.structs.replace(problem, message=message, retry_after_s=retry_after_s))
    error.status = status  # type: ignore[attr-defined]
    return error
