"""A model in this process, for calls of a function that run here: called as a worker's session is.

It runs the ONNX file as it is, on the CPU; precision and shapes are for the engine that a deploy builds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpufn._models import Model
from gpufn.errors import InvalidInput, InvalidSpec


class LocalSession:
    """`session(*arrays, **named)` → an array for one output, a dict for several; `inputs` and `outputs` are names."""

    def __init__(self, path: Path) -> None:
        try:
            import onnxruntime  # noqa: PLC0415  heavy, and a program that calls no model here does without
        except ImportError as error:
            raise InvalidSpec(
                f"to run {path.name} here, install onnxruntime; `.remote(...)` runs it on the platform"
            ) from error
        if not path.is_file():
            raise InvalidSpec(f"there is no file {path}")
        self._session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.inputs = tuple(value.name for value in self._session.get_inputs())
        self.outputs = tuple(value.name for value in self._session.get_outputs())

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        results = self._session.run(None, self._fed(arrays, named))
        return results[0] if len(results) == 1 else dict(zip(self.outputs, results, strict=True))

    def _fed(self, arrays: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        takes = ", ".join(self.inputs)
        if len(arrays) > len(self.inputs):
            raise InvalidInput(f"{len(arrays)} arrays; the model takes {takes}")
        fed = dict(zip(self.inputs, arrays, strict=False))
        for name in named:
            if name in fed or name not in self.inputs:
                why = "given twice" if name in fed else "the model has no such input"
                raise InvalidInput(f"{name}: {why}; it takes {takes}", field=name)
        fed |= named
        for name in self.inputs:
            if name not in fed:
                raise InvalidInput(f"{name}: missing; the model takes {takes}", field=name)
        return fed


def session_of(model: Model, folder: Path) -> LocalSession:
    """One per file and process."""
    return _open(folder / model.path)


@functools.cache
def _open(path: Path) -> LocalSession:
    return LocalSession(path)
