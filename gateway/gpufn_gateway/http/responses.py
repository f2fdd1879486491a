"""How the end of a call is written as an HTTP answer. Each protocol that the gateway speaks has its Wording."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Final, Protocol

from gpufn_core.domain.worker import ColdStart
from gpufn_core.encoding import media
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.body_reader import Send
from gpufn_gateway.problems import Headers, Problem
from gpufn_platform.shared_bodies.bodies import ParcelReader

_JSON: Final = (b"content-type", media.JSON.encode())
_NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
# What a function returns under a type of its own choice must not run as a page of this origin.
_SANDBOX: Final = (b"content-security-policy", b"sandbox")


class Wording(Protocol):
    """A protocol's words for the end of a call."""

    def result(self, content_type: str, size: int) -> Headers:
        """What describes a result's body of `size` bytes, its length among it."""
        ...

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        """An error: status, headers without the length, body."""
        ...


class _Own:
    """Our own interface: results as the function returned them, errors as problems."""

    def result(self, content_type: str, size: int) -> Headers:
        length = (b"content-length", b"%d" % size)
        if content_type == media.JSON:
            return [_JSON, length]
        return [(b"content-type", negotiation.clean(content_type).encode()), length, _NOSNIFF, _SANDBOX]

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        return problem.status, problem.headers(), problem.body()


OWN: Final[Wording] = _Own()


_PART_BYTES: Final = 1 << 20  # of a large result, which waits for its reader in parts


async def send_result(
    send: Send, wording: Wording, content_type: str, body: bytes | ParcelReader, about: Headers
) -> None:
    """Closes a parcel. Raises ArtifactUnavailable when that is cut short, while nothing has been sent or after."""
    if isinstance(body, ParcelReader):
        with body:
            await _send_each(send, [*about, *wording.result(content_type, body.size)], body.parts())
    else:
        await _send_each(send, [*about, *wording.result(content_type, len(body))], _parts_of(body))


async def _send_each(send: Send, headers: Headers, parts: Iterator[bytes | memoryview]) -> None:
    part = next(parts, b"")
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for following in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        part = following
    await send({"type": "http.response.body", "body": part})


def _parts_of(body: bytes) -> Iterator[bytes | memoryview]:
    """All of it, not copied."""
    if len(body) <= _PART_BYTES:
        yield body
        return
    view = memoryview(body)
    for at in range(0, len(view), _PART_BYTES):
        yield view[at : at + _PART_BYTES]


async def send_parts(
    send: Send,
    wording: Wording,
    content_type: str,
    parts: AsyncGenerator[bytes, None],
    about: Headers,
    *,
    size: int,
    is_head: bool = False,
) -> None:
    """A large result as it is read. `is_head`: the request was HEAD, for which it is enough that its first part is
    there. Raises what `parts` does, while nothing has been sent or after."""
    async with contextlib.aclosing(parts):
        first = await anext(parts)
        headers = [*about, *wording.result(content_type, size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if not is_head:
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def send_problem(send: Send, wording: Wording, problem: Problem, about: Headers | None = None) -> None:
    status, headers, body = wording.refusal(problem)
    headers = [*headers, (b"content-length", b"%d" % len(body)), *(about or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def call_headers(invocation: str, revision: bytes) -> Headers:
    """Which call this is, and who runs it."""
    return [(b"x-gpufn-invocation", invocation.encode()), (b"x-gpufn-revision", revision)]


def timing(queue_s: float, gather_s: float, run_s: float, gpu_s: float, cold_start: ColdStart | None) -> Headers:
    """How long the parts of a call took that has ended.

    >>> timing(0.001, 0.002, 0.003, 0.0, None)
    [(b'server-timing', b'queue;dur=1.0, gather;dur=2.0, run;dur=3.0')]
    """
    if gather_s:
        told = b"queue;dur=%.1f, gather;dur=%.1f, run;dur=%.1f" % (queue_s * 1e3, gather_s * 1e3, run_s * 1e3)
    else:
        told = b"queue;dur=%.1f, run;dur=%.1f" % (queue_s * 1e3, run_s * 1e3)
    if gpu_s:
        told += b", gpu;dur=%.1f" % (gpu_s * 1e3)
    if cold_start is not None:
        told += b"".join(b", %s;dur=%.1f" % (phase.encode(), s * 1e3) for phase, s in cold_start.phases.items())
    return [(b"server-timing", told)]
