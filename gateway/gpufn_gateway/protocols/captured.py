"""The outcome of a call in memory, for protocols that put it into their own body."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final, NamedTuple

from gpufn_core.errors import PayloadTooLarge
from gpufn_gateway.problems import CallFailed, Headers, Problem

MAX_CAPTURED_BYTES: Final = 64 << 20


class Outcome(NamedTuple):
    """The result of a call, and the response headers that describe the call."""

    content_type: str
    body: bytes
    headers: Headers


class Capture:
    """A ResponseFormat and an ASGI `send` that keep the response."""

    def __init__(self) -> None:
        self._content_type = ""
        self._headers: Headers = []
        self._body = bytearray()
        self._problem: Problem | None = None

    def result(self, content_type: str, size: int) -> Headers:
        if size > MAX_CAPTURED_BYTES:
            raise PayloadTooLarge(
                f"The result has {size:,} bytes; this protocol returns at most {MAX_CAPTURED_BYTES:,}. Read it at "
                "/v1/functions/{fn}/invoke."
            )
        self._content_type = content_type
        return []

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        self._problem = problem
        return problem.status, [], b""

    async def send(self, event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            self._headers = [header for header in event["headers"] if header[0] != b"content-length"]
        else:
            self._body += event.get("body", b"")

    def outcome(self) -> Outcome:
        """Return the result. Raises CallFailed."""
        if self._problem is not None:
            raise CallFailed(self._problem, self._headers)
        return Outcome(self._content_type, bytes(self._body), self._headers)
