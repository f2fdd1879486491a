"""The inputs that a model is run on: the user's samples, or generated cases.

A samples file is .npz or .safetensors, with one array per input, stacked along a new first axis of samples. Neither
format can contain code, and the sizes in the file are not trusted.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from gpufn_builder.onnx_model.tensors import BF16, Array, Arrays, default_of, describe_tensor, dtype_of
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import MAX_DIMENSIONS, ShapeProfile, TensorSpec

_STAGE: Final = BuildStage.INGEST
MAX_SAMPLES_BYTES: Final = 4 << 30  # unpacked
MAX_SAMPLES: Final = 4096
_MAX_ARRAYS: Final = 1024
_MAX_HEADER_BYTES: Final = 1 << 20
_ZIP: Final = b"PK"
_READ_ERRORS: Final = (
    OSError, ValueError, EOFError, struct.error, msgspec.MsgspecError,
    zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError,  # the last two: unsupported compression
)  # fmt: skip
_WORDS: Final = ("alpha", "beta", "gamma delta", "épsilon", "")

# Element types by their names in safetensors.
_SAFETENSORS: Final[dict[str, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8), "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16), "U32": np.dtype(np.uint32), "I32": np.dtype(np.int32), "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64), "F16": np.dtype(np.float16), "BF16": BF16, "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """The inputs of one run. `is_user_sample`: from the user's samples."""

    name: str
    inputs: Arrays
    is_user_sample: bool = False


class _SafeTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


# --- samples of the user ----------------------------------------------------------------------------------------------


def read_samples(path: Path, inputs: Sequence[TensorSpec], *, max_bytes: int = MAX_SAMPLES_BYTES) -> list[Case]:
    """Read the cases of a samples file for a model with `inputs`. Raises BuildFailed(stage="ingest")."""
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == _ZIP
        arrays = _read_npz(path, max_bytes) if is_zip else _read_safetensors(path, max_bytes)
    except _READ_ERRORS as error:
        raise _error(f"the samples {path.name} cannot be read as .npz or .safetensors: {error}") from error
    for name in arrays:
        if name not in {tensor.name for tensor in inputs}:
            expected = ", ".join(map(describe_tensor, inputs)) or "none"
            raise _error(f"the samples have an array {name}, and the model's inputs are {expected}", name)
    columns = {
        tensor.name: _column(tensor, arrays) for tensor in inputs if tensor.name in arrays or tensor.default is None
    }
    counts = {name: len(array) for name, array in columns.items()}
    if not counts or min(counts.values()) == 0:
        raise _error(f"there is no sample in {path.name}")
    for name, count in counts.items():
        if count != max(counts.values()):
            raise _error(f"there are {count} samples of {name}, and {max(counts.values())} of other inputs", name)
        if count > MAX_SAMPLES:
            raise _error(f"{count} samples are more than the {MAX_SAMPLES} allowed", name)
    return [
        Case(
            f"sample {index}",
            {
                tensor.name: _sample(columns[tensor.name], index) if tensor.name in columns else default_of(tensor)
                for tensor in inputs
            },
            is_user_sample=True,
        )
        for index in range(next(iter(counts.values())))
    ]


def sample_shapes(cases: Sequence[Case]) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of each input in `cases`, for `profiles.resolve_profiles`."""
    names = cases[0].inputs if cases else {}
    return {name: [case.inputs[name].shape for case in cases] for name in names}


def have_rows(cases: Sequence[Case]) -> bool:
    """Return whether the first dimensions of `cases` may count rows: equal and nonzero in all inputs of a case."""
    counts = ({array.shape[0] if array.ndim else 0 for array in case.inputs.values()} for case in cases)
    return all(len(count) == 1 and 0 not in count for count in counts)


def stretch(cases: Sequence[Case], shapes: Mapping[str, tuple[int, ...]], *, batched: bool) -> Case | None:
    """Build a case of these shapes from `cases`: their content is repeated or cut along each dimension. If `batched`,
    the first dimension counts rows, which are taken from one case after the other. None if there is nothing to
    repeat."""
    several = cases[: max(1, *(shape[0] for shape in shapes.values()))] if batched else cases[:1]
    inputs = dict(cases[0].inputs)
    for name, shape in shapes.items():
        array = np.concatenate([case.inputs[name] for case in several]) if batched else inputs[name]
        for axis, size in enumerate(shape):
            if size and not array.shape[axis]:
                return None
            array = np.take(array, range(size), axis, mode="wrap")
        inputs[name] = array
    return Case("stretched samples", inputs)


def _sample(array: Array, index: int) -> Array:
    return array[index : index + 1].reshape(array.shape[1:]).copy()  # array[index] may be a scalar


def _column(tensor: TensorSpec, arrays: Mapping[str, Array]) -> Array:
    """Return all samples of one input."""
    array = arrays.get(tensor.name)
    if array is None:
        raise _error(f"the samples have no array for the input {describe_tensor(tensor)}", tensor.name)
    expected = dtype_of(tensor.datatype)
    if expected == BF16 and array.dtype == np.dtype("V2"):  # numpy's representation
        array = array.view(BF16)
    if tensor.datatype == "BYTES" and array.dtype.kind in "US":
        array = _texts(tensor, array)
    if array.dtype != expected:
        raise _error(
            f"the samples of {describe_tensor(tensor)} are {array.dtype}: use .astype({str(expected)!r})", tensor.name
        )
    if array.ndim != len(tensor.shape) + 1 or any(
        size not in (-1, actual) for size, actual in zip(tensor.shape, array.shape[1:], strict=True)
    ):
        raise _error(
            f"the samples of {describe_tensor(tensor)} have the shape {list(array.shape)}: stack the inputs along a "
            "first axis of samples in one array",
            tensor.name,
        )
    if tensor.datatype == "BOOL" and (largest := int(array.view(np.uint8).max(initial=0))) > 1:
        raise _error(
            f"the samples of {tensor.name} have the byte {largest} in a BOOL tensor, where 0 and 1 are allowed",
            tensor.name,
        )
    return array


def _texts(tensor: TensorSpec, array: Array) -> Array:
    if array.dtype.kind == "S":
        try:
            array = np.char.decode(array, "utf-8")
        except UnicodeDecodeError:
            raise _error(f"the samples of {tensor.name} are not UTF-8", tensor.name) from None
    return array.astype(np.object_)


def _read_npz(path: Path, max_bytes: int) -> Arrays:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if len(members) > _MAX_ARRAYS:
            raise ValueError(f"{len(members)} arrays are more than the {_MAX_ARRAYS} allowed")
        if (total := sum(member.file_size for member in members)) > max_bytes:
            raise ValueError(f"they unpack to {total} bytes, more than the {max_bytes} allowed")
        return {member.filename.removesuffix(".npy"): _read_npy(archive, member) for member in members}


def _read_npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """Read one array. Its header determines the allocation, so it is checked against the actual size."""
    with archive.open(member) as file:
        data = file.read(member.file_size)
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    if dtype.hasobject:
        raise ValueError(f"{member.filename} holds Python objects")
    _check_shape(member.filename, shape)
    if not dtype.itemsize:
        raise ValueError(f"{member.filename} has elements without bytes")
    if math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ValueError(f"{member.filename} does not have the bytes of its shape {list(shape)}")
    stream.seek(0)
    array: Array = np.lib.format.read_array(stream, allow_pickle=False)
    return array


def _check_shape(name: str, shape: Sequence[Any]) -> None:
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name} has {len(shape)} dimensions, and at most {MAX_DIMENSIONS} are allowed")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{name} has an invalid shape: {list(shape)}")


def _read_safetensors(path: Path, max_bytes: int) -> Arrays:
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"they have {size} bytes, more than the {max_bytes} allowed")
    data = path.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", data) if size >= 8 else (0,)
    if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError("it starts like neither of them")
    head = msgspec.json.decode(data[8 : 8 + header_bytes], type=dict[str, msgspec.Raw])
    head.pop("__metadata__", None)
    if len(head) > _MAX_ARRAYS:
        raise ValueError(f"{len(head)} arrays are more than the {_MAX_ARRAYS} allowed")
    body = memoryview(data)[8 + header_bytes :]
    return {name: _read_tensor(name, msgspec.json.decode(raw, type=_SafeTensor), body) for name, raw in head.items()}


def _read_tensor(name: str, tensor: _SafeTensor, body: memoryview) -> Array:
    dtype = _SAFETENSORS.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"{name} has elements of type {tensor.dtype}")
    _check_shape(name, tensor.shape)
    start, end = tensor.data_offsets
    if not 0 <= start <= end <= len(body):
        raise ValueError(f"{name} lies outside of the file")
    if math.prod(tensor.shape) * dtype.itemsize != end - start:
        raise ValueError(f"{name} does not have the bytes of its shape {list(tensor.shape)}")
    return np.frombuffer(body[start:end], dtype).reshape(tensor.shape)


# --- generated --------------------------------------------------------------------------------------------------------


def generate(
    inputs: Sequence[TensorSpec],
    profiles: Sequence[ShapeProfile],
    seed: int,
    index_limits: Mapping[str, int] = MappingProxyType({}),
) -> list[Case]:
    """Generate cases at the `min`, `opt` and `max` shapes of each profile, each shape once; one if all shapes are
    fixed.

    Floats are standard normal. Integers that select from a table are below its limit, by input in `index_limits`. Other
    8-bit integers use their full range, like pixels. Other integers are 0 or 1, with a 1 first in each row: valid as
    positions or segments, and as an attention mask that is not all zeros.
    """
    random = np.random.default_rng(seed)
    cases: dict[tuple[tuple[int, ...], ...], Case] = {}
    for number, profile in enumerate(profiles or (ShapeProfile({}),), 1):
        for point in ("min", "opt", "max") if profiles else ("fixed",):
            shapes = tuple(
                getattr(profile.inputs[tensor.name], point) if tensor.name in profile.inputs else tensor.shape
                for tensor in inputs
            )
            if shapes in cases:
                continue
            name = f"profile {number}, {point} shapes" if len(profiles) > 1 else f"{point} shapes"
            cases[shapes] = Case(
                name,
                {
                    tensor.name: _random(random, tensor.datatype, shape, index_limits.get(tensor.name, 0))
                    if tensor.default is None
                    else default_of(tensor)
                    for tensor, shape in zip(inputs, shapes, strict=True)
                },
            )
    return list(cases.values())


def _random(random: np.random.Generator, datatype: str, shape: tuple[int, ...], limit: int) -> Array:
    dtype = dtype_of(datatype)
    if datatype == "BYTES":
        return np.array(random.choice(_WORDS, shape), np.object_)
    if datatype == "BOOL":
        return np.array(random.integers(0, 2, shape), np.bool_)
    if dtype.kind in "iu":
        if limit:
            return np.array(random.integers(0, min(limit, np.iinfo(dtype).max), shape), dtype)
        if dtype.itemsize == 1:
            bounds = np.iinfo(dtype)
            return np.array(random.integers(bounds.min, bounds.max + 1, shape), dtype)
        drawn = np.array(random.integers(0, 2, shape), dtype)
        if shape:
            drawn[..., :1] = 1
        return drawn
    return np.array(random.standard_normal(shape), np.float64).astype(dtype)


def _error(message: str, node: str = "") -> BuildFailed:
    return BuildFailed(message, stage=_STAGE, node=node)
