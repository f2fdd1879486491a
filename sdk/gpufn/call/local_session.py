"""Sessions that run a model in this process, for local calls of a function. They have the interface of worker sessions.

A session runs the ONNX file unchanged, on the CPU, without batches. Precision, shapes and batches apply only to the
engine that a deploy builds.
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

# ONNX Runtime element type → (Open Inference Protocol datatype, numpy dtype or None)
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
    """Several outputs by name. `outputs.boxes` is `outputs["boxes"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model has no output {name!r}; it has {', '.join(self)}") from None


class LocalSession:
    """A loaded model: `session(*arrays, **named)` returns the array of its only output, or `Outputs`.

    Raises InvalidInput, which names the wrong input.
    """

    def __init__(self, path: Path) -> None:
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # since 1.29, ONNX Runtime sends telemetry by default
        try:
            import onnxruntime  # noqa: PLC0415  heavy, and needed only for local calls of a model
        except ImportError as error:
            raise InvalidSpec(
                f"install onnxruntime to run {path.name} in this process; `.remote(...)` runs it on the platform"
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
        results = self._session.run(None, self._feed(arrays, named))
        names = (output.name for output in self.outputs)
        return results[0] if len(results) == 1 else Outputs(zip(names, results, strict=True))

    async def aio(self, *arrays: Any, **named: Any) -> Any:
        """Call the session in a thread, while other tasks run."""
        import asyncio  # noqa: PLC0415

        return await asyncio.to_thread(self, *arrays, **named)

    def _feed(self, arrays: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the array for each input by name. Raises InvalidInput."""
        import numpy as np  # noqa: PLC0415

        inputs = ", ".join(self._dtypes)
        if len(arrays) > len(self._dtypes):
            raise InvalidInput(f"got {len(arrays)} arrays; the model takes {inputs}")
        feed = dict(zip(self._dtypes, arrays, strict=False))
        for name in named:
            if name in feed or name not in self._dtypes:
                reason = "given twice" if name in feed else "the model has no such input"
                raise InvalidInput(f"{name}: {reason}; it takes {inputs}", field=name)
        feed |= named
        for name, dtype in self._dtypes.items():
            if name not in feed and name in self._optional:
                continue
            if name not in feed:
                raise InvalidInput(f"{name}: missing; the model takes {inputs}", field=name)
            if dtype is not None and not isinstance(feed[name], np.ndarray):
                feed[name] = np.asarray(feed[name], dtype)
        return feed


def session_of(model: Model, folder: Path) -> LocalSession:
    """Return the session of a model: one per file and process."""
    return _open(folder / model.path)


@functools.cache
def _open(path: Path) -> LocalSession:
    return LocalSession(path)


def _spec(value: Any) -> TensorSpec:
    """Convert ONNX Runtime's description of an input or output. A dimension with a name is dynamic."""
    datatype, _ = _TYPES.get(value.type, (value.type, None))
    return TensorSpec(value.name, datatype, tuple(size if isinstance(size, int) else -1 for size in value.shape))
