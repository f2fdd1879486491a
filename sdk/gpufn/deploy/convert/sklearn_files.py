"""Files of scikit-learn as ONNX: skops, which loads known types only, and joblib, a pickle.

The ONNX model takes one input `x`, a float32 matrix with a row per sample.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any, Final

from gpufn.deploy.convert.first_line import first_line
from gpufn.deploy.convert.options import ConvertOptions
from gpufn.deploy.convert.packages import required
from gpufn_core.errors import InvalidSpec

# skl2onnx 1.20 converts no IsolationForest to version 4, its default. The other models that were tried convert to both.
_ML_OPSET: Final = 3


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
    inputs = [("x", skl2onnx.common.data_types.FloatTensorType([None, int(columns)]))]
    _set_convertible(model)
    try:
        converted = _converted(skl2onnx, model, inputs)
    except Exception as error:  # it has no class of its own for a model that it does not convert
        raise InvalidSpec(
            f"skl2onnx does not convert its {type(model).__name__} to a model of one matrix of numbers: load such a "
            f"model in a class with @enter ({first_line(error)})"
        ) from error
    for output in converted.graph.output:
        if output.type.WhichOneof("value") == "sequence_type":
            raise InvalidSpec(
                f"{source} has a {type(model).__name__}, whose output {output.name} is a sequence in ONNX, and only "
                "tensors can be sent: deploy a model for each target, or load this one in a class with @enter"
            )
    onnx.write_bytes(converted.SerializeToString())


def _set_convertible(model: Any) -> None:
    """Set an option of a VotingClassifier that only concerns its `transform`, and with which skl2onnx refuses it."""
    steps = getattr(model, "steps", None)
    last = steps[-1][1] if steps else model
    if getattr(last, "flatten_transform", None) is True:
        last.flatten_transform = False


def _converted(skl2onnx: Any, model: Any, inputs: list[Any]) -> Any:
    """Convert with probabilities as a matrix, for classifiers that have the choice."""
    opsets = {"": skl2onnx.get_latest_tested_opset_version(), "ai.onnx.ml": _ML_OPSET}
    to_onnx = functools.partial(skl2onnx.to_onnx, model, initial_types=inputs, target_opset=opsets)
    if hasattr(model, "classes_"):
        with contextlib.suppress(NameError):  # LinearSVC has scores, as a matrix already
            return to_onnx(options={id(model): {"zipmap": False}})
    return to_onnx()


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
