"""A chat model for OpenAI's clients: a function that serves `openai-chat`, and yields words as it writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gpufn import Weights, enter, gpu_function, method
from language import Language

MODEL = Weights("model.json")
_LONGEST = 500  # words


@gpu_function(serves="openai-chat", weights=MODEL, concurrency=16, idle_timeout=60)
class Parrot:
    @enter
    def load(self) -> None:
        self._language = msgspec.json.decode(MODEL.path.read_bytes(), type=Language)

    @method
    def chat(
        self,
        messages: list[dict[str, Any]],
        temperature: float = 1.0,
        max_tokens: int = 40,
        seed: int | None = None,
    ) -> Iterator[str]:
        """Go on from the rarest word of the last message. The parameters are those of OpenAI that this model takes."""
        topic = self._language.topic(str(messages[-1]["content"]))
        yield from self._language.write(topic, min(max_tokens, _LONGEST), temperature, seed)
