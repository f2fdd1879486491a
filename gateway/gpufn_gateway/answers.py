"""How the end of a call is written as an HTTP answer. Each protocol that the gateway speaks has its Wording."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Final, Protocol

from gpufn import media
from gpufn.protocol.messages import ResultReply
from gpufn_gateway import negotiation
from gpufn_gateway.bodies import Send
from gpufn_gateway.problems import Headers, Problem

_JSON: Final = (b"content-type", media.JSON.encode())
_NOSNIFF: Final = (b"x-content-type-options", b"nosniff")
# What a function returns under a type of its own choice must not run as a page of this origin.
_SANDBOX: Final = (b"content-security-policy", b"sandbox")


class Wording(Protocol):
    """A protocol's words for the end of a call."""

    def result(self, content_type: str, body: bytes | memoryview) -> Headers:
        """What describes a result's body, its length among it."""
        ...

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        """An error: status, headers without the length, body."""
        ...


class _Own:
    """Our own interface: results as the function returned them, errors as problems."""

    def result(self, content_type: str, body: bytes | memoryview) -> Headers:
        length = (b"content-length", b"%d" % len(body))
        if content_type == media.JSON:
            return [_JSON, length]
        return [(b"content-type", negotiation.clean(content_type).encode()), length, _NOSNIFF, _SANDBOX]

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        return problem.status, problem.headers(), problem.body()


OWN: Final[Wording] = _Own()


_PART_BYTES: Final = 1 << 20  # of a large result, which waits for its reader in parts


async def send_result(
    send: Send, wording: Wording, content_type: str, body: bytes | memoryview, about: Headers
) -> None:
    headers = [*about, *wording.result(content_type, body)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while len(body) > _PART_BYTES:
        await send({"type": "http.response.body", "body": body[:_PART_BYTES], "more_body": True})
        body = memoryview(body)[_PART_BYTES:]
    await send({"type": "http.response.body", "body": body})


async def send_parts(
    send: Send, content_type: str, parts: AsyncGenerator[bytes, None], size: int, about: Headers
) -> None:
    """A large result as it is read. Raises what `parts` does, while nothing has been sent or after."""
    async with contextlib.aclosing(parts):
        first = await anext(parts)
        headers = [each for each in OWN.result(content_type, b"") if each[0] != b"content-length"]
        length = (b"content-length", b"%d" % size)
        await send({"type": "http.response.start", "status": 200, "headers": [*about, *headers, length]})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        async for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def send_problem(send: Send, wording: Wording, problem: Problem, about: Headers | None = None) -> None:
    status, headers, body = wording.refusal(problem)
    headers = [*headers, (b"content-length", b"%d" % len(body)), *(about or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def reply_headers(reply: ResultReply, revision: bytes) -> Headers:
    """Which call this was, who ran it, and how long its parts took."""
    timing = b"queue;dur=%.1f, run;dur=%.1f" % (reply.queue_s * 1e3, reply.run_s * 1e3)
    if reply.gpu_s:
        timing += b", gpu;dur=%.1f" % (reply.gpu_s * 1e3)
    if (cold := reply.cold_start) is not None:
        timing += b"".join(b", %s;dur=%.1f" % (phase.encode(), s * 1e3) for phase, s in cold.phases.items())
    return [
        (b"x-gpufn-invocation", reply.invocation.encode()),
        (b"x-gpufn-revision", revision),
        (b"server-timing", timing),
    ]
