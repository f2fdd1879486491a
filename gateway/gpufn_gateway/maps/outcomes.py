"""Encodings of a map's outcomes, in the order in which the items ended.

    application/x-ndjson             one line per item: index, cursor, state, and result or error; for people and curl
    application/vnd.gpufn.outcomes   `gpufn_core.encoding.media.OUTCOME`, for the SDK

A Cursor is the position of a reader: it has read all outcomes up to there.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding import media
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.records import CallRecord
from gpufn_gateway import problems
from gpufn_gateway.http import negotiation
from gpufn_gateway.openapi.request_bounds import CURSOR
from gpufn_gateway.submitted import call_views


class Cursor(NamedTuple):
    """The sequence of the last record that was read, and the number of outcomes of the map up to it."""

    seq: int = 0
    ended: int = 0

    def __str__(self) -> str:
        return f"{self.seq}.{self.ended}"

    @classmethod
    def read(cls, text: str | None) -> Cursor:
        """Parse a cursor. None or empty means the start. Raises InvalidInput."""
        if not text:
            return cls()
        if (match := CURSOR.fullmatch(text)) is None:
            raise InvalidInput(f"after must be the cursor of an outcome, not {text[:40]!r}", field="after")
        return cls(int(match[1]), int(match[2]))


class Outcomes(Protocol):
    content_type: str
    heartbeat: bytes

    def outcome(self, index: int, cursor: Cursor, record: CallRecord, body: bytes) -> bytes: ...


class Lines:
    content_type = media.LINES
    heartbeat = b"\n"

    def outcome(self, index: int, cursor: Cursor, record: CallRecord, body: bytes) -> bytes:
        line: dict[str, Any] = {"index": index, "cursor": str(cursor), "state": record.state}
        if record.state is not InvocationState.SUCCEEDED:
            line["error"] = msgspec.Raw(problems.from_state(record.state, record.error).body())
        elif record.content_type == media.JSON and not record.blob:
            line["result"] = msgspec.Raw(body or b"null")
        else:
            line |= {"content_type": record.content_type, "links": call_views.links(record.id)}
        return msgspec.json.encode(line) + b"\n"


class Records:
    content_type = media.OUTCOMES
    heartbeat = media.OUTCOME.pack(media.MapOutcomeKind.EMPTY, 0, 0, 0, 0, 0)

    def outcome(self, index: int, cursor: Cursor, record: CallRecord, body: bytes) -> bytes:
        kind, content_type = media.MapOutcomeKind.RESULT, record.content_type
        if record.state is not InvocationState.SUCCEEDED:
            kind, content_type = media.MapOutcomeKind.PROBLEM, media.PROBLEM
            body = problems.from_state(record.state, record.error).body()
        elif record.blob:
            kind, body = media.MapOutcomeKind.BY_REFERENCE, b""
        name = negotiation.clean(content_type).encode() if content_type else b""
        return b"".join((media.OUTCOME.pack(kind, len(name), len(body), index, *cursor), name, body))


def encoding_for(accept: str) -> Outcomes:
    return Records() if media.OUTCOMES in accept else Lines()
