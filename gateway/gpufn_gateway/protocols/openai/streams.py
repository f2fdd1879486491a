"""Streams of chat completions and of transcriptions."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gpufn_gateway.http.sse import Events
from gpufn_gateway.problems import Problem
from gpufn_gateway.protocols.openai import bodies
from gpufn_gateway.protocols.openai.errors import error_object

_DONE: Final = b"data: [DONE]\n\n"


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(fields)


class ChatChunks:
    """A stream of chat completion chunks: one per item of the generator."""

    content_type = Events.content_type
    heartbeat = Events.heartbeat

    def __init__(self, model: str) -> None:
        self._model = model

    def item(self, number: int, content_type: str, body: bytes) -> bytes:
        role = {"role": "assistant"} if number == 0 else {}  # clients join the roles of all chunks
        return self._chunk(role | {"content": bodies.message(msgspec.json.decode(body))}, None)

    def end(self, items: int) -> bytes:
        return self._chunk({}, "stop") + _DONE

    def error(self, problem: Problem) -> bytes:
        return _event({"error": error_object(problem)})

    def _chunk(self, delta: dict[str, str], finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
        return _event(
            {
                "id": bodies.COMPLETION_ID,
                "object": "chat.completion.chunk",
                "created": 0,
                "model": self._model,
                "choices": [choice],
            }
        )


class TranscriptEvents:
    """A stream of a transcription: one delta per item of the generator."""

    content_type = Events.content_type
    heartbeat = Events.heartbeat

    def __init__(self) -> None:
        self._text: list[str] = []

    def item(self, number: int, content_type: str, body: bytes) -> bytes:
        text = bodies.message(msgspec.json.decode(body))
        self._text.append(text)
        return _event({"type": "transcript.text.delta", "delta": text})

    def end(self, items: int) -> bytes:
        return _event({"type": "transcript.text.done", "text": "".join(self._text)}) + _DONE

    def error(self, problem: Problem) -> bytes:
        return _event({"error": error_object(problem)})
