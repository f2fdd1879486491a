"""A render farm: tiles of a scene are rendered by many workers, then joined to pictures and a film."""

from __future__ import annotations

import io
import os
import signal
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import gpufn
from gpufn import Graph, Retry, gpu_function
from tracer import render

_TILES = 6  # per picture
_MAX_PIXELS = 4_000_000


@gpu_function(max_workers=8, idle_timeout=30, retries=Retry(3))
def tile(turn: float, size: tuple[int, int], first: int, rows: int, crash: bool = False) -> NDArray[np.uint8]:
    """Render the rows of a tile. With `crash` the worker kills itself at the first attempt, to show the retry."""
    if crash and gpufn.current().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pixels: NDArray[np.uint8] = render(turn, *size, first, rows)
    return pixels


@gpu_function(idle_timeout=30)
def join(tiles: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    return np.concatenate(tiles)


@gpu_function(idle_timeout=30)
def gif(pictures: list[NDArray[np.uint8]], frames_per_s: int = 12) -> bytes:
    """Encode pictures as an animated GIF."""
    first, *others = (Image.fromarray(pixels).quantize(64) for pixels in pictures)
    with io.BytesIO() as file:
        first.save(file, "GIF", save_all=True, append_images=others, duration=1000 // frames_per_s, loop=0)
        return file.getvalue()


@gpu_function(timeout=600, idle_timeout=30)
def still(turn: float = 0.0, width: int = 480, height: int = 270, crash: bool = False) -> bytes:
    """Render one picture: a map over its tiles. Returns a PNG."""
    tiles = _tiles(turn, (width, height), crash)
    parts = []
    for part in tile.starmap(tiles):
        parts.append(part)
        gpufn.current().progress(len(parts) / len(tiles), f"{len(parts)} of {len(tiles)} tiles")
    with io.BytesIO() as file:
        Image.fromarray(np.concatenate(parts)).save(file, "PNG")
        return file.getvalue()


@gpu_function(timeout=3600, idle_timeout=30)
def film(frames: int = 24, width: int = 320, height: int = 180, crash: bool = False) -> bytes:
    """Render a turn of the scene: tiles become pictures, and pictures a GIF. Each step starts when its inputs exist."""
    if not 1 <= frames <= 200:
        raise ValueError(f"a film has 1 to 200 frames, not {frames}")
    graph = Graph()
    pictures = []
    for number in range(frames):
        tiles = [graph.call(tile, *each) for each in _tiles(number / frames / 6, (width, height), crash)]
        pictures.append(graph.call(join, tiles))
    encoded = graph.call(gif, pictures)
    for done, _ in enumerate(graph.run(window=8), 1):
        gpufn.current().progress(done / len(graph), f"{done} of {len(graph)} steps")
    return encoded.result


def _tiles(turn: float, size: tuple[int, int], crash: bool) -> list[tuple[float, tuple[int, int], int, int, bool]]:
    """Return the arguments of `tile` for each tile of a picture. With `crash`, the one at the top crashes."""
    if not (size[0] > 0 and size[1] >= _TILES and size[0] * size[1] <= _MAX_PIXELS):
        raise ValueError(f"a picture of {size[0]} x {size[1]} is too small or has more than {_MAX_PIXELS:,} pixels")
    edges = [size[1] * number // _TILES for number in range(_TILES + 1)]
    return [(turn, size, top, bottom - top, crash and top == 0) for top, bottom in pairwise(edges)]
