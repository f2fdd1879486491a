"""The responses API over functions that serve `openai-chat`: input as messages, and text as the output of a response.

A response is not stored: the client sends the whole conversation each time.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_gateway.http.sse import Events
from gpufn_gateway.problems import Problem
from gpufn_gateway.protocols.openai import bodies
from gpufn_gateway.protocols.openai.errors import error_object

_ID: Final = "resp_gpufn"
_MESSAGE: Final = "msg_gpufn"
_TEXTS: Final = ("input_text", "output_text", "text")


def messages(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request, with `messages` in place of `input` and `instructions`. Raises InvalidInput."""
    given = dict(fields)
    asked, instructions = given.pop("input", None), given.pop("instructions", None)
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not isinstance(items, list):
        raise InvalidInput("input must be a text or a list of messages", field="input")
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    return {**given, "messages": [*system, *map(_message, items)]}


def _message(item: Any) -> dict[str, str]:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str) or item.get("type", "message") != "message":
        raise InvalidInput("input may have only messages, each with a role and content", field="input")
    content = item.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) and part.get("type") in _TEXTS else {} for part in content]
        content = "".join(str(part["text"]) for part in parts) if all("text" in part for part in parts) else None
    if not isinstance(content, str):
        raise InvalidInput("the content of a message must be text", field="input")
    return {"role": item["role"], "content": content}


def response(fields: dict[str, Any], text: str | None) -> dict[str, Any]:
    """Return a response; without `text`, one in progress."""
    status = "in_progress" if text is None else "completed"
    return {
        "id": _ID,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": fields["model"],
        "output": [] if text is None else [_output(text)],
        "instructions": fields.get("instructions"),
        "metadata": fields.get("metadata") or {},
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }


def _output(text: str | None) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    status = "in_progress" if text is None else "completed"
    return {"type": "message", "id": _MESSAGE, "status": status, "role": "assistant", "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


class ResponseEvents:
    """The stream of a response: one delta per item of the generator."""

    content_type = Events.content_type
    heartbeat = Events.heartbeat

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self._text: list[str] = []
        self._sequence = 0

    def item(self, number: int, content_type: str, body: bytes) -> bytes:
        start = b"" if self._sequence else self._start()
        text = bodies.message(msgspec.json.decode(body))
        self._text.append(text)
        return start + self._event("response.output_text.delta", **_PLACE, item_id=_MESSAGE, delta=text, logprobs=[])

    def end(self, items: int) -> bytes:
        start = b"" if self._sequence else self._start()
        text = "".join(self._text)
        return start + b"".join(
            (
                self._event("response.output_text.done", **_PLACE, item_id=_MESSAGE, text=text, logprobs=[]),
                self._event("response.content_part.done", **_PLACE, item_id=_MESSAGE, part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=_output(text)),
                self._event("response.completed", response=response(self._fields, text)),
            )
        )

    def error(self, problem: Problem) -> bytes:
        error = error_object(problem)
        fields = {name: error[name] for name in ("code", "message", "param")}
        return self._event("error", **fields)

    def _start(self) -> bytes:
        return b"".join(
            (
                self._event("response.created", response=response(self._fields, None)),
                self._event("response.output_item.added", output_index=0, item=_output(None)),
                self._event("response.content_part.added", **_PLACE, item_id=_MESSAGE, part=_part("")),
            )
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


_PLACE: Final = {"output_index": 0, "content_index": 0}
