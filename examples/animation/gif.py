"""Encode an animated GIF, from frames that are indices into one palette, with numpy alone.

The pixels are written as LZW codes without any compression: after each 250 pixels the code table is cleared, so that
codes stay at 9 bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_CLEAR, _END, _CODE_BITS = 256, 257, 9
_PIXELS_PER_CLEAR = 250  # the 255th code after a clear would need ten bits
_BLOCK_BYTES = 255


def gif(frames: list[NDArray[np.uint8]], palette: NDArray[np.uint8], frames_per_s: int = 25) -> bytes:
    """Return the file. `frames`: (height, width) each, all of one size; `palette`: (256, 3), red, green and blue."""
    height, width = frames[0].shape
    size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    parts = [b"GIF89a", size, b"\xf7\0\0", palette.tobytes(), b"\x21\xff\x0bNETSCAPE2.0\x03\x01\0\0\0"]
    delay = round(100 / frames_per_s).to_bytes(2, "little")
    for frame in frames:
        parts += [b"\x21\xf9\x04\0", delay, b"\0\0", b"\x2c\0\0\0\0", size, b"\0", b"\x08", *_blocks(_codes(frame))]
    return b"".join([*parts, b"\x3b"])


def _codes(frame: NDArray[np.uint8]) -> bytes:
    pixels = frame.ravel().astype(np.uint16)
    codes = np.append(np.insert(pixels, np.arange(0, len(pixels), _PIXELS_PER_CLEAR), _CLEAR), _END)
    bits = (codes[:, None] >> np.arange(_CODE_BITS)) & 1
    return np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()


def _blocks(data: bytes) -> list[bytes]:
    parts = [data[at : at + _BLOCK_BYTES] for at in range(0, len(data), _BLOCK_BYTES)]
    return [bytes([len(part)]) + part for part in parts] + [b"\0"]
