"""A toy language model: how often each word followed the one or two before it in a text. It understands nothing."""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

_CONTEXT = 2  # words
_ENDS = ".!?"
_TOKEN = re.compile(r"[A-Za-z][\w'-]*|[.,;:!?]")


class Language(msgspec.Struct):
    following: dict[str, dict[str, int]]
    """The counts of the words that followed one word, or two with a space between them"""

    def topic(self, question: str) -> str:
        """Return the rarest long word of the question that the model knows, or a full stop, which begins a sentence."""
        known = [word for word in words(question) if len(word) > 4 and word in self.following]
        return min(known, key=lambda word: sum(self.following[word].values()), default=".")

    def write(self, topic: str, count: int, temperature: float, seed: int | None) -> Iterator[str]:
        """Yield words that go on from the topic, each with the space before it: at most `count`, and no sentence that
        begins in the second half of them."""
        chance = random.Random(seed)
        text = [topic]
        if topic != ".":
            yield topic.capitalize()
        for _ in range(count if topic == "." else count - 1):
            word = self._next(text, temperature, chance)
            space = "" if text == ["."] or not word[0].isalpha() else " "
            yield space + (word.capitalize() if text[-1] in _ENDS and word.islower() else word)
            text.append(word)
            if word in _ENDS and len(text) > count // 2:
                break

    def _next(self, text: list[str], temperature: float, chance: random.Random) -> str:
        contexts = (" ".join(text[-length:]) for length in range(_CONTEXT, 0, -1))
        counts = next(self.following[context] for context in (*contexts, ".") if context in self.following)
        likeliest = max(counts, key=counts.__getitem__)
        if temperature < 0.01:
            return likeliest
        weights = [(count / counts[likeliest]) ** (1 / temperature) for count in counts.values()]
        (word,) = chance.choices(list(counts), weights)
        return word


def trained(text: str) -> Language:
    following: defaultdict[str, Counter[str]] = defaultdict(Counter)
    before = ["."]
    for word in [*words(text), "."]:
        for length in range(1, len(before) + 1):
            following[" ".join(before[-length:])][word] += 1
        before = [*before, word][-_CONTEXT:]
    return Language({context: dict(counts) for context, counts in following.items()})


def words(text: str) -> Iterator[str]:
    """Yield words and punctuation marks. The first word of a sentence is in lower case, unless it is one like ONNX."""
    before = "."
    for token in _TOKEN.findall(text):
        yield token.lower() if before in _ENDS and token.istitle() else token
        before = token
