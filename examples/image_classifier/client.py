"""Call the bare model with a client that knows nothing of gpufn: NVIDIA's tritonclient, in batches of tensors.

gpufn deploy classifier.onnx --max-batch 32
python client.py localhost:8090
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tritonclient.http as triton

from pictures import SHAPES, labelled


def probabilities_of(server: str, images: Any, model: str = "classifier") -> Any:
    """`images`: uint8 (n, 64, 64, 3). Returns float32 (n, 8), in the order of `pictures.SHAPES`."""
    tensors = np.ascontiguousarray(images.transpose(0, 3, 1, 2), np.float32) / 255
    with triton.InferenceServerClient(server) as client:
        tensor = triton.InferInput("images", list(tensors.shape), "FP32")
        tensor.set_data_from_numpy(tensors)
        return client.infer(model, [tensor]).as_numpy("probabilities")


if __name__ == "__main__":
    pictures, labels = labelled(16, np.random.default_rng())
    for label, row in zip(labels, probabilities_of(sys.argv[1], pictures), strict=True):
        kinds = list(SHAPES)
        print(f"{kinds[label]:<10} taken for: {kinds[row.argmax()]} ({row.max():.0%})")
