"""A function with a model: `scores.onnx`, beside this file, is written by the test that deploys it."""

from __future__ import annotations

from typing import Any

from gpufn import Model, gpu_function


@gpu_function(models={"net": Model("scores.onnx", max_batch=4)}, concurrency=2)
def scored(rows: list[list[float]], net: Any) -> dict[str, Any]:
    found = net(rows)
    return {"logits": found.logits.tolist(), "label": found["label"].tolist()}
