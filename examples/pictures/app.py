"""Pictures in, pictures or facts about them out. The body of a call is the picture itself."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFilter

from gpufn import gpu_function

_MAX_PIXELS = 40_000_000


@gpu_function(idle_timeout=30)
def thumbnail(picture: bytes, size: int = 128) -> bytes:
    """Return the picture as a PNG that fits a square of `size` pixels."""
    image = _open(picture)
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    return _png(image)


@gpu_function(idle_timeout=30)
def palette(picture: bytes, colors: int = 5) -> list[dict[str, str | float]]:
    """Return the dominant colors, most common first, each with the share of the picture that it covers."""
    image = _open(picture)
    image.thumbnail((200, 200))
    reduced = image.quantize(colors)
    chosen = np.array(reduced.getpalette()).reshape(-1, 3)
    counts = np.bincount(np.asarray(reduced).ravel(), minlength=len(chosen)).tolist()
    total = sum(counts)
    by_count = sorted(zip(counts, chosen.tolist(), strict=False), reverse=True)
    return [
        {"color": "#{:02x}{:02x}{:02x}".format(*color), "share": round(count / total, 4)}
        for count, color in by_count
        if count
    ]


@gpu_function(idle_timeout=30)
def edges(picture: bytes) -> bytes:
    """Return the magnitude of the Sobel gradient, as a gray PNG."""
    gray = np.asarray(_open(picture).convert("L").filter(ImageFilter.GaussianBlur(1)), np.float32)
    padded = np.pad(gray, 1, mode="edge")
    smooth = padded[:-2] + 2 * padded[1:-1] + padded[2:]
    across = smooth[:, 2:] - smooth[:, :-2]
    smooth = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]
    down = smooth[2:] - smooth[:-2]
    strength = np.hypot(across, down)
    return _png(Image.fromarray((strength * (255 / max(strength.max(), 1))).astype(np.uint8)))


@gpu_function(idle_timeout=30)
def landscape(width: int = 480, height: int = 320, hour: float = 19.0) -> bytes:
    """Draw a picture for the other functions: sky, sun, two ranges of hills and a lake, in the light of `hour`."""
    dusk = min(abs(hour - 13) / 7, 1)
    sky = _gradient((70, 130, 200), (40, 40, 90), dusk), _gradient((190, 220, 245), (245, 140, 80), dusk)
    rows = np.linspace(0, 1, height)[:, None, None] ** 0.8
    image = Image.fromarray(np.broadcast_to(_gradient(sky[0], sky[1], rows), (height, width, 3)).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    x, y, radius = width * 0.65, height * (0.15 + 0.45 * dusk), height * 0.07
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=(255, 235, 170))
    across = np.arange(width)
    for base, size, color in ((0.62, 0.10, (70, 80, 110)), (0.74, 0.06, (40, 70, 50))):
        ridge = height * (base - size * np.abs(np.sin(across / width * 7 + base * 20)) - 0.01 * np.sin(across / 9))
        draw.polygon([(0, height), *zip(across.tolist(), ridge.tolist(), strict=True), (width, height)], fill=color)
    shore = int(height * 0.8)
    above = image.crop((0, 2 * shore - height, width, shore)).transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    lake = Image.blend(above.filter(ImageFilter.BoxBlur(2)), Image.new("RGB", above.size, (30, 60, 90)), 0.4)
    image.paste(lake, (0, shore))
    return _png(image)


def _open(picture: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(picture))
    if image.width * image.height > _MAX_PIXELS:
        raise ValueError(f"a picture of {image.width} x {image.height} is larger than {_MAX_PIXELS:,} pixels")
    return image.convert("RGB")


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _gradient(start: ArrayLike, end: ArrayLike, share: ArrayLike) -> NDArray[np.float64]:
    first, last = np.asarray(start, float), np.asarray(end, float)
    mixed: NDArray[np.float64] = first + (last - first) * np.asarray(share)
    return mixed
