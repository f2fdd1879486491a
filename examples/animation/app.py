"""A short animation: frames are rendered in parallel, then encoded; the call reports its progress."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import gpufn
from gif import gif
from gpufn import Graph, Retry, gpu_function

_MAX_FRAMES = 500


@gpu_function(max_workers=4, idle_timeout=30, retries=Retry(2))
def render(number: int, count: int, size: int) -> NDArray[np.uint8]:
    """Render a frame: waves from two points that circle each other. Returns palette indices of shape (size, size)."""
    turn = 2 * np.pi * number / count
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    height = np.zeros((size, size))
    for side in (0.0, np.pi):
        distance = np.hypot(x - 0.5 * np.cos(turn + side), y - 0.5 * np.sin(turn + side))
        height += np.sin(14 * distance - turn) / (1 + 3 * distance)
    return np.clip(128 + 90 * height, 0, 255).astype(np.uint8)


@gpu_function(idle_timeout=30)
def encode(frames: list[NDArray[np.uint8]], frames_per_s: int = 25) -> bytes:
    """Encode frames of palette indices as an animated GIF."""
    shade = np.linspace(0, 1, 256)
    palette = np.stack([shade**2 * 255, shade * 230, 60 + shade * 195], axis=1).astype(np.uint8)
    animation: bytes = gif(frames, palette, frames_per_s)
    return animation


@gpu_function(timeout=600, idle_timeout=30)
def animate(count: int = 48, size: int = 160, frames_per_s: int = 25) -> bytes:
    """Make the whole animation. Encoding needs all frames, so it starts after the last one."""
    if not 1 <= count <= _MAX_FRAMES:
        raise ValueError(f"an animation has 1 to {_MAX_FRAMES} frames, not {count}")
    graph = Graph()
    frames = [graph.call(render, number, count, size) for number in range(count)]
    encoded = graph.call(encode, frames, frames_per_s)
    ctx = gpufn.current()
    for done, step in enumerate(graph.run(window=8), 1):
        ctx.progress(done / len(graph), "encoded" if step is encoded else f"{done} of {count} frames")
    return encoded.result
