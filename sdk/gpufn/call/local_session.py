"""A model in this process, for calls of a function that run here: called as a worker's session is.

It runs the ONNX file as it is, on the CPU, each call by itself; precision, shapes and batches are for the engine that a
deploy builds.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpufn.declare.model import Model
from gpufn_core.errors import InvalidInput, InvalidSpec
from gpufn_core.inference.ort_integers import EXACT
from gpufn_core.spec.model_spec import TensorSpec

# ONNX Runtime's name of an element type → the Open Inference Protocol's, and numpy's where it has one.
_TYPES: dict[str, tuple[str, str | None]] = {
    "tensor(bool)": ("BOOL", "bool"),
    "tensor(uint8)": ("UINT8", "uint8"),
    "tensor(uint16)": ("UINT16", "uint16"),
    "tensor(uint32)": ("UINT32", "uint32"),
    "tensor(uint64)": ("UINT64", "uint64"),
    "tensor(int8)": ("INT8", "int8"),
    "tensor(int16)": ("INT16", "int16"),
    "tensor(int32)": ("INT32", "int32"),
    "tensor(int64)": ("INT64", "int64"),
    "tensor(float16)": ("FP16", "float16"),
    "tensor(float)": ("FP32", "float32"),
    "tensor(double)": ("FP64", "float64"),
    "tensor(bfloat16)": ("BF16", None),
    "tensor(string)": ("BYTES", "object"),
}


class Outputs(dict[str, Any]):
    """Several outputs, by name; `outputs.boxes` is `outputs["boxes"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model has no output {name!r}; it has {', '.join(self)}") from None


class LocalSession:
    """`session(*arrays, **named)` → the array of its one output, or `Outputs`. InvalidInput names a wrong input."""

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # from 1.29 on it reports to its maker unless told not to
        try:
            import onnxruntime  # noqa: PLC0415  heavy, and a program that calls no model here does without
        except ImportError as error:
            raise InvalidSpec(
                f"to run {path.name} here, install onnxruntime; `.remote(...)` runs it on the platform"
            ) from error
        if not path.is_file():
            raise InvalidSpec(f"there is no file {path}")
        options = onnxruntime.SessionOptions()
        for entry, value in EXACT.items():
            options.add_session_config_entry(entry, value)
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        defaults = self._session.get_overridable_initializers()
        self.inputs = tuple(map(_spec, (*self._session.get_inputs(), *defaults)))
        self.outputs = tuple(map(_spec, self._session.get_outputs()))
        self._optional = {value.name for value in defaults}
        self._dtypes = {
            value.name: _TYPES.get(value.type, ("", None))[1] for value in (*self._session.get_inputs(), *defaults)
        }

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        results = self._session.run(None, self._fed(arrays, named))
        names = (output.name for output in self.outputs)
        return results[0] if len(results) == 1 else Outputs(zip(names, results, strict=True))

    async def aio(self, *arrays: Any, **named: Any) -> Any:
        """As a call, and other tasks run meanwhile."""
        import asyncio  # noqa: PLC0415

        return await asyncio.to_thread(self, *arrays, **named)

    def _fed(self, arrays: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        import numpy as np  # noqa: PLC0415

        takes = ", ".join(self._dtypes)
        if len(arrays) > len(self._dtypes):
            raise InvalidInput(f"{len(arrays)} arrays; the model takes {takes}")
        fed = dict(zip(self._dtypes, arrays, strict=False))
        for name in named:
            if name in fed or name not in self._dtypes:
                why = "given twice" if name in fed else "the model has no such input"
                raise InvalidInput(f"{name}: {why}; it takes {takes}", field=name)
        fed |= named
        for name, dtype in self._dtypes.items():
            if name not in fed and name in self._optional:
                continue
            if name not in fed:
                raise InvalidInput(f"{name}: missing; the model takes {takes}", field=name)
            if dtype is not None and not isinstance(fed[name], np.ndarray):
                fed[name] = np.asarray(fed[name], dtype)
        return fed


def session_of(model: Model, folder: Path) -> LocalSession:
    """One per file and process."""
    return _open(folder / model.path)


@functools.cache
def _open(path: Path) -> LocalSession:
    return LocalSession(path)


def _spec(value: Any) -> TensorSpec:
    """Of what ONNX Runtime tells of an input or output; a size with a name is dynamic."""
    datatype, _ = _TYPES.get(value.type, (value.type, None))
    return TensorSpec(value.name, datatype, tuple(size if isinstance(size, int) else -1 for size in value.shape))
