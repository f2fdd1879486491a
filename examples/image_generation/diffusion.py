"""A toy diffusion model of shapes: the sampler is real, and the denoiser knows only the pictures that it draws itself.

A network would learn to estimate the clean picture behind a noisy one. For a small set of pictures this estimate has a
closed form, the mean of the set, weighted by how well each picture explains the noisy one. So there is nothing to
train, and a generated picture is always close to one of the set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

SIZE = 48  # pixels
COLORS = {"red": (210, 60, 50), "green": (70, 160, 80), "blue": (60, 100, 200), "yellow": (235, 195, 60)}
SHAPES = ("circle", "square", "triangle", "ring")
_PER_PROMPT = 60  # pictures of each shape in each color
_NOISE_FIRST, _NOISE_LAST = 60.0, 4.0  # standard deviations; between them the picture is decided

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Estimate:
    """The picture as it looks after a step: `pixels` are uint8 of shape (SIZE, SIZE, 3)."""

    step: int
    pixels: NDArray[np.uint8]


class Diffusion:
    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        self._set = {
            (color, shape): np.stack([_draw(color, shape, rng).ravel() for _ in range(_PER_PROMPT)])
            for color in COLORS
            for shape in SHAPES
        }

    def sample(self, prompt: str, steps: int, seed: int) -> Iterator[Estimate]:
        """Yield an estimate after each step, from a blur to a picture: Euler's method, as in Karras et al. (2022)."""
        known = self._pictures(prompt)
        noises = np.append(np.geomspace(_NOISE_FIRST, _NOISE_LAST, steps), 0.0)
        noisy = noises[0] * np.random.default_rng(seed).standard_normal(known.shape[1])
        for step, (noise, less) in enumerate(pairwise(noises), 1):
            clean = _denoised(noisy, noise, known)
            noisy = clean + (noisy - clean) * (less / noise)
            yield Estimate(step, ((clean.reshape(SIZE, SIZE, 3) + 1) * 127.5).clip(0, 255).astype(np.uint8))

    def _pictures(self, prompt: str) -> Floats:
        """Return the pictures that fit the words of the prompt; other words have no effect."""
        words = prompt.lower().split()
        colors = [color for color in COLORS if color in words] or list(COLORS)
        shapes = [shape for shape in SHAPES if shape in words] or list(SHAPES)
        return np.concatenate([self._set[color, shape] for color in colors for shape in shapes])


def _denoised(noisy: NDArray[np.float64], noise: float, known: Floats) -> NDArray[np.float64]:
    fit = -((known - noisy) ** 2).sum(1) / (2 * noise**2)
    weights = np.exp(fit - fit.max())
    mean: NDArray[np.float64] = weights @ known / weights.sum()
    return mean


def _draw(color: str, shape: str, rng: np.random.Generator) -> Floats:
    """Return a shape of random size at a random place, on a light background: from -1 to 1."""
    radius = rng.uniform(9, 17)
    x0, y0 = rng.uniform(radius + 2, SIZE - radius - 2, 2)
    y, x = np.mgrid[:SIZE, :SIZE]
    x, y = x - x0, y - y0
    outside = {  # the distance to the edge in pixels, negative inside
        "circle": np.hypot(x, y) - radius,
        "square": np.maximum(abs(x), abs(y)) - 0.85 * radius,
        "triangle": np.maximum(0.87 * abs(x) - 0.5 * y, y) - 0.55 * radius,
        "ring": abs(np.hypot(x, y) - 0.75 * radius) - 0.25 * radius,
    }[shape]
    covered = (0.5 - outside).clip(0, 1)[..., None]  # with smooth edges
    background = np.array([250, 246, 238]) - rng.uniform(0, 25)
    pixels = covered * np.array(COLORS[color]) + (1 - covered) * background
    scaled: Floats = (pixels / 127.5 - 1).astype(np.float32)
    return scaled
