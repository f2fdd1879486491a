"""The formats of models that `gpufn deploy` takes, and how each is recognised."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Final

_FACTORY = re.compile(r"(?P<file>.+\.py):(?P<factory>[A-Za-z_]\w*)")


class Format(enum.Enum):
    ONNX = "onnx"
    FACTORY = "factory"  # FILE.py:FACTORY, which returns a torch module
    TORCHSCRIPT = "torchscript"
    TORCH_EXPORT = "torch-export"
    SKOPS = "skops"
    JOBLIB = "joblib"
    MLFLOW = "mlflow"  # a folder

    @property
    def runs_code(self) -> bool:
        """Whether reading the file can run code that it contains."""
        return self in (Format.TORCH_EXPORT, Format.JOBLIB, Format.MLFLOW)


_SUFFIXES: Final = {
    ".onnx": Format.ONNX,
    ".pt": Format.TORCHSCRIPT,
    ".torchscript": Format.TORCHSCRIPT,
    ".pt2": Format.TORCH_EXPORT,
    ".skops": Format.SKOPS,
    ".joblib": Format.JOBLIB,
    ".pkl": Format.JOBLIB,
}
NAMES: Final = "MODEL.onnx, .pt, .pt2, .skops or .joblib, a folder of MLflow, or FILE.py:FACTORY"


def format_of(source: str) -> Format | None:
    """Return the format of a model, or None if `source` is no model.

    >>> [format_of(each) for each in ("Net.ONNX", "app.py:make_model", "app.py")]
    [<Format.ONNX: 'onnx'>, <Format.FACTORY: 'factory'>, None]
    """
    if _FACTORY.fullmatch(source):
        return Format.FACTORY
    path = Path(source)
    return Format.MLFLOW if (path / "MLmodel").is_file() else _SUFFIXES.get(path.suffix.lower())


def split_factory(source: str) -> tuple[str, str] | None:
    """Return the file and the name of a factory, or None.

    >>> split_factory("models/app.py:make_model")
    ('models/app.py', 'make_model')
    """
    match = _FACTORY.fullmatch(source)
    return None if match is None else (match["file"], match["factory"])
