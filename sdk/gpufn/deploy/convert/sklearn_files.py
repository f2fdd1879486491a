"""Files of scikit-learn as ONNX: skops, which loads known types only, and joblib, a pickle.

The ONNX model takes one input `x`, a float32 matrix with a row per sample.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpufn.deploy.convert.options import ConvertOptions
from gpufn.deploy.convert.packages import required
from gpufn_core.errors import InvalidSpec


def convert(source: str, onnx: Path, options: ConvertOptions) -> None:
    required("sklearn", "scikit-learn skl2onnx")
    skl2onnx = required("skl2onnx", "scikit-learn skl2onnx")
    model = _skops(source, options) if source.lower().endswith(".skops") else _joblib(source)
    columns = getattr(model, "n_features_in_", None)
    if not hasattr(model, "predict") and not hasattr(model, "transform"):
        raise InvalidSpec(f"{source} has a {type(model).__name__}, which is no model of scikit-learn")
    if columns is None:
        raise InvalidSpec(
            f"{source} has a {type(model).__name__} that is not fitted, or takes no matrix of numbers: load such a "
            "model in a class with @enter"
        )
    types = skl2onnx.common.data_types
    is_classifier = hasattr(model, "classes_")
    options_of = {"zipmap": False} if is_classifier else {}  # probabilities as a matrix
    converted = skl2onnx.to_onnx(
        model,
        initial_types=[("x", types.FloatTensorType([None, int(columns)]))],
        options={id(model): options_of} if options_of else None,
    )
    onnx.write_bytes(converted.SerializeToString())


def _skops(source: str, options: ConvertOptions) -> Any:
    io = required("skops.io", "skops")
    unknown = io.get_untrusted_types(file=source)
    if unknown and not options.is_trusted:
        raise InvalidSpec(
            f"{source} has types that skops does not trust: {', '.join(unknown)}. If you trust the author, pass "
            "--trust-model"
        )
    return io.load(source, trusted=unknown)


def _joblib(source: str) -> Any:
    joblib = required("joblib", "joblib")
    return joblib.load(source)
