"""Pictures to train on and to try: one shape each, of any size, color, place and angle, over a noisy gradient.

python pictures.py star star.png
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

SIZE = 64  # pixels per side
_SMOOTH = 2  # drawn this many times larger, then averaged

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Picture = NDArray[np.uint8]


def picture(kind: str, rng: np.random.Generator) -> Picture:
    """Return a picture with one shape of this kind, a key of `SHAPES`: uint8 of shape (SIZE, SIZE, 3)."""
    pixels = SIZE * _SMOOTH
    y, x = np.mgrid[:pixels, :pixels] / pixels * 2 - 1
    angle, scale = rng.uniform(0, 2 * np.pi), rng.uniform(0.35, 0.7)
    dx, dy = rng.uniform(-0.3, 0.3, 2)
    u = ((x - dx) * np.cos(angle) + (y - dy) * np.sin(angle)) / scale
    v = ((y - dy) * np.cos(angle) - (x - dx) * np.sin(angle)) / scale
    inside = SHAPES[kind](u, v)

    top, bottom, color = rng.uniform(0, 1, (3, 3))
    while min(np.abs(color - top).max(), np.abs(color - bottom).max()) < 0.3:
        color = rng.uniform(0, 1, 3)
    image = top + (y[..., None] + 1) / 2 * (bottom - top)
    image[inside] = color
    image += rng.normal(0, rng.uniform(0, 0.12), image.shape)
    small = image.reshape(SIZE, _SMOOTH, SIZE, _SMOOTH, 3).mean((1, 3))
    result: Picture = (small.clip(0, 1) * 255).astype(np.uint8)
    return result


def labelled(count: int, rng: np.random.Generator) -> tuple[Picture, NDArray[np.int64]]:
    """Return `count` pictures, and the index of each one's kind in `SHAPES`."""
    kinds = list(SHAPES)
    labels = rng.integers(0, len(kinds), count)
    return np.stack([picture(kinds[label], rng) for label in labels]), labels


def save(kind: str, path: str) -> None:
    """Save a new picture of this kind as a file."""
    from PIL import Image  # noqa: PLC0415  training does not need it

    Image.fromarray(picture(kind, np.random.default_rng())).save(path)


def _circle(u: Floats, v: Floats, radius: float = 1) -> Mask:
    inside: Mask = np.hypot(u, v) < radius
    return inside


def _ring(u: Floats, v: Floats) -> Mask:
    return _circle(u, v) & ~_circle(u, v, 0.63)


def _moon(u: Floats, v: Floats) -> Mask:
    return _circle(u, v) & ~_circle(u - 0.5, v, 0.77)


def _square(u: Floats, v: Floats) -> Mask:
    return np.maximum(np.abs(u), np.abs(v)) < 0.8


def _cross(u: Floats, v: Floats) -> Mask:
    return (np.minimum(np.abs(u), np.abs(v)) < 0.25) & (np.maximum(np.abs(u), np.abs(v)) < 0.9)


def _triangle(u: Floats, v: Floats) -> Mask:
    return (v > -0.5) & (v < 1 - 3**0.5 * np.abs(u))


def _star(u: Floats, v: Floats) -> Mask:
    inside: Mask = np.hypot(u, v) < 0.7 + 0.35 * np.cos(5 * np.arctan2(v, u))
    return inside


def _arrow(u: Floats, v: Floats) -> Mask:
    head = (u > 0) & (np.abs(v) < 0.8 * (1 - u))
    return head | ((u <= 0) & (u > -0.9) & (np.abs(v) < 0.25))


SHAPES: dict[str, Callable[[Floats, Floats], Mask]] = {
    "circle": _circle,
    "ring": _ring,
    "moon": _moon,
    "square": _square,
    "cross": _cross,
    "triangle": _triangle,
    "star": _star,
    "arrow": _arrow,
}

if __name__ == "__main__":
    save(*sys.argv[1:])
