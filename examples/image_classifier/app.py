"""A picture in, the shape in it out. The platform builds the model; the function does the pre- and postprocessing."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from gpufn import Model, gpu_function
from pictures import SHAPES, SIZE


@gpu_function(models={"net": Model("classifier.onnx", max_batch=32)}, concurrency=8, idle_timeout=30)
def classify(image: bytes, net: Any, top: int = 3) -> list[dict[str, Any]]:
    """Return the `top` likeliest shapes in a PNG or JPEG, the likeliest first.

    Each call has one picture. With `concurrency` several calls run at once, and their pictures share runs of the model.
    """
    pixels = np.asarray(Image.open(io.BytesIO(image)).convert("RGB").resize((SIZE, SIZE)), np.float32) / 255
    (probabilities,) = net(pixels.transpose(2, 0, 1)[None])
    likeliest = np.argsort(-probabilities)[:top]
    return [{"shape": list(SHAPES)[index], "probability": round(float(probabilities[index]), 4)} for index in likeliest]
