"""Generators: each item reaches the caller as soon as it is yielded."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator

from gpufn import gpu_function

_SHADES = " .:-=+*#%@"
_DEPTH = 200

# Lewis Carroll, Alice's Adventures in Wonderland (1865).
_TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank and of having nothing to do once or twice she
had peeped into the book her sister was reading but it had no pictures or conversations in it and what is the use of a
book thought Alice without pictures or conversations So she was considering in her own mind as well as she could for the
hot day made her feel very sleepy and stupid whether the pleasure of making a daisy chain would be worth the trouble of
getting up and picking the daisies when suddenly a White Rabbit with pink eyes ran close by her There was nothing so
very remarkable in that nor did Alice think it so very much out of the way to hear the Rabbit say to itself Oh dear
Oh dear I shall be late
"""


@gpu_function(idle_timeout=30)
def mandelbrot(width: int = 72, height: int = 24, x: float = -0.6, y: float = 0.0, span: float = 3.2) -> Iterator[str]:
    """Yield the Mandelbrot set around (x, y), one row of characters at a time."""
    for row in range(height):
        imaginary = y + span * (0.5 - (row + 0.5) / height) * 0.75
        reals = (x + span * ((column + 0.5) / width - 0.5) for column in range(width))
        yield "".join(_shade(complex(real, imaginary)) for real in reals)


@gpu_function(concurrency=20, idle_timeout=30)
async def story(words: int = 40, seed: int = 0, pause_s: float = 0.02) -> AsyncIterator[str]:
    """Yield words of a Markov chain over the first lines of Alice in Wonderland, at a slow language model's pace."""
    followers: dict[str, list[str]] = defaultdict(list)
    text = _TEXT.split()
    for word, follower in zip(text, text[1:] + text[:1], strict=True):
        followers[word].append(follower)
    chance = random.Random(seed)
    word = text[0]
    for _ in range(words):
        yield word
        word = chance.choice(followers[word])
        await asyncio.sleep(pause_s)


def _shade(c: complex) -> str:
    z = 0j
    for step in range(_DEPTH):
        if abs(z) > 2:
            return _SHADES[min(step // 2, len(_SHADES) - 2)]
        z = z * z + c
    return _SHADES[-1]


if __name__ == "__main__":
    for line in mandelbrot.stream():
        print(line)
