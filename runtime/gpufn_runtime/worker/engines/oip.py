"""Bodies of the Open Inference Protocol, V2, with its binary tensor extension.

A body is a JSON head, `;header-bytes=N` long, and after it the bytes of the tensors that the head says are binary, in
its order; without that parameter all of it is JSON. Numbers are little-endian and row-major; JSON data may be flat or
nested. An element of a BYTES tensor has its length before it, four bytes.

Binary tensors are views of the body. What does not fit raises InvalidInput, which names the tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from gpufn_core.encoding.media import TENSORS
from gpufn_core.encoding.msgspec_errors import json_fault
from gpufn_core.encoding.values import number_word
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.model_spec import DATATYPES, LARGEST_SIZE, LONGEST_NAME, MOST_DIMENSIONS, TensorSpec
from gpufn_runtime.worker.engines.base import Array, Arrays, contiguous
from gpufn_runtime.worker.engines.tensors import as_array, dtype_of, texts

_LENGTH = struct.Struct("<I")
_MOST_ELEMENTS = 1 << 48  # numpy counts an empty array's other sizes, too

_Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
_Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_DIMENSIONS)]
_Parameters = dict[str, Any] | None  # null is what some clients write for what they leave out


class _Tensor(msgspec.Struct, kw_only=True):
    name: _Name
    datatype: str
    shape: _Shape
    parameters: _Parameters = None
    data: Any = None


class _Output(msgspec.Struct, kw_only=True):
    name: _Name
    parameters: _Parameters = None


class _Head(msgspec.Struct, kw_only=True):
    inputs: list[_Tensor]
    outputs: list[_Output] | None = None
    id: str | None = None
    parameters: _Parameters = None


class _Answered(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] = {}
    data: list[Any] | None = None


class _Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    model_name: str
    model_version: str
    id: str = ""
    outputs: list[_Answered]


_head = msgspec.json.Decoder(_Head)


@dataclass(frozen=True)
class Request:
    """`outputs` are those asked for, in that order, and whether each is to be binary."""

    id: str
    inputs: Arrays
    outputs: Mapping[str, bool]


def decode(
    content_type: str, body: bytes | memoryview, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> Request:
    """The request in `body`, for a model of these inputs and outputs. Shapes are what the request says; whether the
    model takes them is not looked at, nor whether all inputs are there."""
    text, binary = _parts(content_type, memoryview(body))
    try:
        head = _head.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"this is no inference request: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"this is no inference request: {json_fault(error, text)}") from None
    except RecursionError:
        raise InvalidInput("this is no inference request: it is nested too deep") from None
    return Request(head.id or "", _arrays(head.inputs, inputs, binary), _wanted(head, [spec.name for spec in outputs]))


def encode(
    request: Request, results: Arrays, outputs: Sequence[TensorSpec], model: str, version: str
) -> tuple[str, tuple[bytes | memoryview, ...]]:
    """The answer: content type, and the parts of the body, of which binary tensors are the arrays' own memory."""
    specs = {spec.name: spec for spec in outputs}
    answered: list[_Answered] = []
    blobs: list[bytes | memoryview] = []
    for name, is_binary in request.outputs.items():
        tensor = _Answered(name=name, datatype=specs[name].datatype, shape=results[name].shape)
        if is_binary:
            blob = _to_bytes(results[name], tensor.datatype)
            tensor.parameters = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            tensor.data = _to_list(results[name], tensor.datatype)
        answered.append(tensor)
    head = msgspec.json.encode(_Answer(model_name=model, model_version=version, id=request.id, outputs=answered))
    if not blobs:
        return TENSORS, (head,)
    return f"{TENSORS};header-bytes={len(head)}", (head, *blobs)


# --- reading ---------------------------------------------------------------------------------------------------------


def _parts(content_type: str, body: memoryview) -> tuple[memoryview, memoryview]:
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "header-bytes":
            text = value.strip()
            if not (text.isascii() and text.isdigit() and int(text) <= len(body)):
                raise InvalidInput(f"a head of {text[:40]!r} bytes does not fit a body of {len(body)}")
            return body[: int(text)], body[int(text) :]
    return body, body[len(body) :]


def _arrays(tensors: list[_Tensor], specs: Sequence[TensorSpec], binary: memoryview) -> Arrays:
    known = {spec.name: spec for spec in specs}
    arrays: Arrays = {}
    at = 0
    for tensor in tensors:
        name = tensor.name
        spec = known.get(name)
        if spec is None:
            raise InvalidInput(f"{name}: the model has no such input; it takes {', '.join(known)}", field=name)
        if name in arrays:
            raise InvalidInput(f"{name}: given twice", field=name)
        if tensor.datatype != spec.datatype:
            raise InvalidInput(f"{name}: the model takes {spec.datatype}, not {tensor.datatype[:40]}", field=name)
        if not _is_shape(tensor.shape):
            raise InvalidInput(f"{name}: {list(tensor.shape)} is no shape", field=name)
        size = _binary_size(tensor, len(binary) - at)
        if size is None:
            arrays[name] = _from_json(tensor, spec)
        else:
            arrays[name] = _from_bytes(tensor, spec, binary[at : at + size])
            at += size
    if at != len(binary):
        raise InvalidInput(f"{len(binary) - at} bytes after the head belong to no input")
    return arrays


def _is_shape(sizes: tuple[int, ...]) -> bool:
    return all(0 <= size <= LARGEST_SIZE for size in sizes) and math.prod(size or 1 for size in sizes) < _MOST_ELEMENTS


def _binary_size(tensor: _Tensor, left: int) -> int | None:
    """Bytes of a binary tensor; None for one whose data is in the JSON."""
    parameters = tensor.parameters or {}
    if "shared_memory_region" in parameters:
        raise InvalidInput(f"{tensor.name}: regions of shared memory are not supported", field=tensor.name)
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if tensor.data is not None:
        raise InvalidInput(f"{tensor.name}: has both data and binary_data_size", field=tensor.name)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= left:
        shown = repr(size)[:40]
        raise InvalidInput(f"{tensor.name}: binary_data_size {shown}, and {left} bytes are left", field=tensor.name)
    return size


def _from_json(tensor: _Tensor, spec: TensorSpec) -> Array:
    if tensor.data is None:
        raise InvalidInput(f"{tensor.name}: has neither data nor binary_data_size", field=tensor.name)
    array = as_array(spec, tensor.data)
    if array.shape == tensor.shape:
        return array
    if array.size != math.prod(tensor.shape):
        raise _wrong_size(tensor, f"{array.size} elements")
    return array.reshape(tensor.shape)


def _from_bytes(tensor: _Tensor, spec: TensorSpec, data: memoryview) -> Array:
    count = math.prod(tensor.shape)
    if spec.datatype == "BYTES":
        elements = list(_elements(tensor, data))
        if len(elements) != count:
            raise _wrong_size(tensor, f"{len(elements)} elements")
        return texts(spec, _objects(elements)).reshape(tensor.shape)
    if len(data) != count * DATATYPES[spec.datatype]:
        raise _wrong_size(tensor, f"{len(data)} bytes")
    return np.frombuffer(data, dtype_of(spec.datatype)).reshape(tensor.shape)


def _elements(tensor: _Tensor, data: memoryview) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        end = at + _LENGTH.size
        if end <= len(data):
            end += _LENGTH.unpack_from(data, at)[0]
        if end > len(data) or end < at + _LENGTH.size:
            raise _wrong_size(tensor, f"{len(data)} bytes, in which an element is cut off,")
        yield bytes(data[at + _LENGTH.size : end])
        at = end


def _objects(elements: list[bytes]) -> Array:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def _wrong_size(tensor: _Tensor, what: str) -> InvalidInput:
    return InvalidInput(
        f"{tensor.name}: {what} do not make {tensor.datatype}{list(tensor.shape)}, which has"
        f" {math.prod(tensor.shape)} elements",
        field=tensor.name,
    )


def _wanted(head: _Head, names: list[str]) -> dict[str, bool]:
    default = bool((head.parameters or {}).get("binary_data_output", False))
    wanted: dict[str, bool] = {}
    for output in head.outputs or ():
        name, parameters = output.name, output.parameters or {}
        if name not in names:
            raise InvalidInput(f"{name}: the model has no such output; it has {', '.join(names)}", field=name)
        for parameter in ("classification", "shared_memory_region"):
            if parameters.get(parameter):
                raise InvalidInput(f"{name}: {parameter} is not supported", field=name)
        wanted[name] = bool(parameters.get("binary_data", default))
    return wanted or dict.fromkeys(names, default)


# --- writing ---------------------------------------------------------------------------------------------------------


def _to_bytes(array: Array, datatype: str) -> bytes | memoryview:
    if datatype != "BYTES":
        whole = contiguous(array)
        return whole.reshape(-1).view(np.uint8).data if whole.size else b""
    encoded = (_encoded(element) for element in array.reshape(-1).tolist())
    return b"".join(part for element in encoded for part in (_LENGTH.pack(len(element)), element))


def _to_list(array: Array, datatype: str) -> list[Any]:
    flat = array.reshape(-1)
    if datatype == "BF16":
        # bfloat16 is the upper half of a float32.
        flat = (contiguous(flat).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    found: list[Any] = flat.tolist()
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        return [each if math.isfinite(each) else number_word(each) for each in found]
    return found


def _encoded(element: str | bytes) -> bytes:
    return element if isinstance(element, bytes) else element.encode()
