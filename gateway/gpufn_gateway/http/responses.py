"""HTTP responses for the outcome of a call. Each protocol of the gateway has its own ResponseFormat."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Final, Protocol

from gpufn_core.domain.worker import ColdStart
from gpufn_core.encoding import media
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.body_reader import Send
from gpufn_gateway.problems import Headers, Problem
from gpufn_platform.shared_bodies.bodies import SharedBodyReader

_JSON: Final = (b"content-type", media.JSON.encode())
# Users choose the content type of results and arguments. They must not run as a page of this origin.
USER_CONTENT: Final[Headers] = [
    (b"content-security-policy", b"sandbox; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
]


class ResponseFormat(Protocol):
    """How a protocol represents results and errors."""

    def result(self, content_type: str, size: int) -> Headers:
        """Return the headers of a result of `size` bytes, including Content-Length."""
        ...

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        """Return the status, headers (without Content-Length) and body of an error."""
        ...


class _GpufnFormat:
    """The gpufn API: results as the function returned them, errors as problem details."""

    def result(self, content_type: str, size: int) -> Headers:
        length = (b"content-length", b"%d" % size)
        if content_type == media.JSON:
            return [_JSON, length]
        return [(b"content-type", negotiation.clean(content_type).encode()), length, *USER_CONTENT]

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        return problem.status, problem.headers(), problem.body()


GPUFN_FORMAT: Final[ResponseFormat] = _GpufnFormat()


_PART_BYTES: Final = 1 << 20  # a large result is sent in parts of this size, at the client's pace


async def send_result(
    send: Send,
    response_format: ResponseFormat,
    content_type: str,
    body: bytes | SharedBodyReader,
    extra_headers: Headers,
) -> None:
    """Send a result, and close it if it is a shared body. `extra_headers` are added to the response.

    Raises ArtifactUnavailable if the file of a shared body is cut short, before or after the response has started.
    """
    if isinstance(body, SharedBodyReader):
        with body:
            await _send_each(send, [*extra_headers, *response_format.result(content_type, body.size)], body.parts())
        return
    headers = [*extra_headers, *response_format.result(content_type, len(body))]
    if len(body) > _PART_BYTES:
        await _send_each(send, headers, _parts_of(body))
    else:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _send_each(send: Send, headers: Headers, parts: Iterator[bytes | memoryview]) -> None:
    part = next(parts, b"")
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for following in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        part = following
    await send({"type": "http.response.body", "body": part})


def _parts_of(body: bytes) -> Iterator[bytes | memoryview]:
    """Split a body into parts without copying."""
    view = memoryview(body)
    for at in range(0, len(view), _PART_BYTES):
        yield view[at : at + _PART_BYTES]


async def send_parts(
    send: Send,
    response_format: ResponseFormat,
    content_type: str,
    parts: AsyncGenerator[bytes, None],
    extra_headers: Headers,
    *,
    size: int,
    is_head: bool = False,
) -> None:
    """Send a large result part by part. For HEAD (`is_head`) only the first part is read.

    Raises the exceptions of `parts`, before or after the response has started.
    """
    async with contextlib.aclosing(parts):
        first = await anext(parts)
        headers = [*extra_headers, *response_format.result(content_type, size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if not is_head:
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def send_problem(
    send: Send, response_format: ResponseFormat, problem: Problem, extra_headers: Headers | None = None
) -> None:
    status, headers, body = response_format.refusal(problem)
    headers = [*headers, (b"content-length", b"%d" % len(body)), *(extra_headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def call_headers(invocation: str, revision: bytes) -> Headers:
    """Return the headers with the id of a call and the revision that runs it."""
    return [(b"x-gpufn-invocation", invocation.encode()), (b"x-gpufn-revision", revision)]


def timing(queue_s: float, gather_s: float, run_s: float, gpu_s: float, cold_start: ColdStart | None) -> Headers:
    """Return the Server-Timing header of a call that has ended.

    >>> timing(0.001, 0.002, 0.003, 0.0, None)
    [(b'server-timing', b'queue;dur=1.0, gather;dur=2.0, run;dur=3.0')]
    """
    if gather_s:
        value = b"queue;dur=%.1f, gather;dur=%.1f, run;dur=%.1f" % (queue_s * 1e3, gather_s * 1e3, run_s * 1e3)
    else:
        value = b"queue;dur=%.1f, run;dur=%.1f" % (queue_s * 1e3, run_s * 1e3)
    if gpu_s:
        value += b", gpu;dur=%.1f" % (gpu_s * 1e3)
    if cold_start is not None:
        value += b"".join(b", %s;dur=%.1f" % (phase.encode(), s * 1e3) for phase, s in cold_start.phases.items())
    return [(b"server-timing", value)]
