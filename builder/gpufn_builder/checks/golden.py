"""Cases as .npz files: inputs with their outputs, as `in.<name>` and `out.<name>`.

Cases are passed to candidate processes in this form, and an engine contains its golden sample in this form. The files
contain no pickles: BF16 is stored as the uint16 of its bits, text as arrays of fixed width.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from gpufn_builder.onnx_model.tensors import BF16, Array, Arrays
from gpufn_core.spec.model_spec import TensorSpec

_IN: Final = "in."
_OUT: Final = "out."


def save(path: Path, inputs: Arrays, outputs: Arrays) -> None:
    arrays = {_IN + name: _storable(array) for name, array in inputs.items()}
    arrays |= {_OUT + name: _storable(array) for name, array in outputs.items()}
    np.savez(path, allow_pickle=False, **arrays)


def load(path: Path, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> tuple[Arrays, Arrays]:
    with np.load(path, allow_pickle=False) as file:
        return (
            {spec.name: _restored(file[_IN + spec.name], spec) for spec in inputs},
            {spec.name: _restored(file[_OUT + spec.name], spec) for spec in outputs},
        )


def _storable(array: Array) -> Array:
    if array.dtype == BF16:
        return np.require(array, requirements="C").view(np.uint16)
    return array.astype(np.str_) if array.dtype == np.object_ else array


def _restored(array: Array, spec: TensorSpec) -> Array:
    if spec.datatype == "BF16":
        return array.view(BF16)
    return array.astype(np.object_) if spec.datatype == "BYTES" else array
