"""Text in pictures, with its place: RapidOCR's ONNX models behind an upload."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import msgspec

import gpufn
from gpufn import web_endpoint

# With the Python that deploys. The package has no release for Python 3.13: then write gpufn.Image.python("3.12").
RAPIDOCR = gpufn.Image().pip_install("rapidocr-onnxruntime==1.4.4")


class Line(msgspec.Struct):
    text: str
    score: float
    box: list[list[float]]
    """The corners in pixels of the picture: top left, top right, bottom right, bottom left"""


@cache
def engine() -> Any:
    from rapidocr_onnxruntime import RapidOCR  # noqa: PLC0415  only the environment of the function has it

    return RapidOCR()


@web_endpoint(methods=["POST"], image=RAPIDOCR, memory="1Gi", cpu=1, public=True)
def ocr(picture: bytes, min_score: float = 0.5) -> list[Line]:
    """Return the lines of text in a picture, from top to bottom. Uncertain lines, below `min_score`, are left out."""
    from PIL import Image, ImageOps  # noqa: PLC0415

    image = ImageOps.exif_transpose(Image.open(io.BytesIO(picture)))  # a phone stores a photo with its angle
    if image.mode == "P":  # RapidOCR would read the numbers of the palette as shades of gray
        image = image.convert("RGB")
    found, _ = engine()(image)
    return [
        Line(text, round(score, 3), [[round(x, 1), round(y, 1)] for x, y in box])
        for box, text, score in found or []
        if score >= min_score
    ]
