"""A language model whose probabilities are weights: a file that each node fetches once."""

import json
import random

from gpufn import Weights, enter, gpu_function, method

BIGRAMS = Weights("bigrams.json")


@gpu_function(weights=BIGRAMS, idle_timeout=10)
class Babbler:
    @enter
    def load(self) -> None:
        self.following: dict[str, dict[str, int]] = json.loads(BIGRAMS.path.read_text())

    @method
    def babble(self, words: int = 12, seed: int = 0) -> str:
        """Return random words, each of which followed the one before it somewhere in the text."""
        choose = random.Random(seed)
        known = sorted(self.following)
        text = [choose.choice(known)]
        while len(text) < words:
            options = self.following.get(text[-1]) or dict.fromkeys(known, 1)
            text += choose.choices(list(options), list(options.values()))
        return " ".join(text)
