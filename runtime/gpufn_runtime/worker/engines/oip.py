"""Encode and decode bodies of the Open Inference Protocol, V2, with its binary tensor extension.

A body is a JSON head of `;header-bytes=N` bytes, followed by the bytes of those tensors that the head declares as
binary, in its order. Without that parameter the whole body is JSON. Numbers are little-endian and row-major; JSON data
may be flat or nested. Each element of a BYTES tensor is preceded by its length in four bytes.

Binary tensors are views of the body. A mismatch raises InvalidInput, which names the tensor.
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
from gpufn_core.encoding.msgspec_errors import describe_json_error
from gpufn_core.encoding.values import number_word
from gpufn_core.errors import InvalidInput, ResultNotEncodable
from gpufn_core.spec.model_spec import DATATYPES, LARGEST_SIZE, LONGEST_NAME, MAX_DIMENSIONS, TensorSpec
from gpufn_runtime.worker.engines.base import Array, Arrays, contiguous
from gpufn_runtime.worker.engines.tensors import as_array, datatype_of, dtype_of, texts

_LENGTH = struct.Struct("<I")
# Parameters of a request that the protocol and its extensions define.
_OF_PROTOCOL = frozenset(
    {"binary_data_output", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "headers"}
)
_MOST_ELEMENTS = 1 << 48  # also limits the other sizes of an empty array

_Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
_Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
_Parameters = dict[str, Any] | None  # some clients write null for omitted parameters


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


class _ResponseTensor(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] = {}
    data: list[Any] | None = None


class _Response(msgspec.Struct, kw_only=True, omit_defaults=True):
    model_name: str
    model_version: str
    id: str = ""
    outputs: list[_ResponseTensor]


_head = msgspec.json.Decoder(_Head)


@dataclass(frozen=True)
class Request:
    """A decoded request. `outputs`: the requested outputs in order, and whether each must be binary."""

    id: str
    inputs: Arrays
    outputs: Mapping[str, bool]


@dataclass(frozen=True)
class FunctionRequest:
    """A decoded request for a function with code. The outputs are known once the function has returned."""

    inputs: Arrays
    parameters: Mapping[str, Any]
    head: _Head


def decode(
    content_type: str, body: bytes | memoryview, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> Request:
    """Decode a request for a model with these inputs and outputs. Checks neither whether the model accepts the shapes
    nor whether inputs are missing."""
    head, binary = _read_head(content_type, body)
    return Request(
        head.id or "", _arrays(head.inputs, inputs, binary), _requested_outputs(head, [spec.name for spec in outputs])
    )


def decode_for_function(content_type: str, body: bytes | memoryview, datatypes: Mapping[str, str]) -> FunctionRequest:
    """Decode a request for a function whose arrays have these names and datatypes; "" is any datatype."""
    head, binary = _read_head(content_type, body)
    for tensor in head.inputs:
        if tensor.datatype not in DATATYPES:
            raise InvalidInput(f"{tensor.name}: there is no datatype {tensor.datatype[:40]!r}", field=tensor.name)
    sent = {tensor.name: tensor.datatype for tensor in head.inputs}
    specs = [TensorSpec(name, wanted or sent.get(name, ""), (-1,)) for name, wanted in datatypes.items()]
    given = {name: value for name, value in (head.parameters or {}).items() if name not in _OF_PROTOCOL}
    return FunctionRequest(_arrays(head.inputs, specs, binary), given, head)


def _read_head(content_type: str, body: bytes | memoryview) -> tuple[_Head, memoryview]:
    text, binary = _parts(content_type, memoryview(body))
    try:
        return _head.decode(text), binary
    except msgspec.ValidationError as error:
        raise InvalidInput(f"this is not an inference request: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"this is not an inference request: {describe_json_error(error, text)}") from None
    except RecursionError:
        raise InvalidInput("this is not an inference request: it is nested too deeply") from None


def encode(
    request: Request, results: Arrays, outputs: Sequence[TensorSpec], model: str, version: str
) -> tuple[str, tuple[bytes | memoryview, ...]]:
    """Encode the response: content type and parts of the body. Binary tensors share memory with the arrays."""
    specs = {spec.name: spec for spec in outputs}
    tensors: list[_ResponseTensor] = []
    blobs: list[bytes | memoryview] = []
    for name, is_binary in request.outputs.items():
        tensor = _ResponseTensor(name=name, datatype=specs[name].datatype, shape=results[name].shape)
        if is_binary:
            blob = _to_bytes(results[name], tensor.datatype)
            tensor.parameters = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            tensor.data = _to_list(results[name], tensor.datatype)
        tensors.append(tensor)
    head = msgspec.json.encode(_Response(model_name=model, model_version=version, id=request.id, outputs=tensors))
    if not blobs:
        return TENSORS, (head,)
    return f"{TENSORS};header-bytes={len(head)}", (head, *blobs)


def encode_result(
    request: FunctionRequest, result: Any, model: str, version: str
) -> tuple[str, tuple[bytes | memoryview, ...]]:
    """Encode the result of a function. Raises ResultNotEncodable for a value that is no tensor."""
    if isinstance(result, Mapping):
        named = {str(name): value for name, value in result.items()}
    elif isinstance(result, (tuple, list)):
        named = {f"output_{number}": value for number, value in enumerate(result)}
    else:
        named = {"output": result}
    arrays: Arrays = {}
    specs: list[TensorSpec] = []
    for name, value in named.items():
        array = np.asarray(value)
        datatype = datatype_of(array.dtype)
        if datatype is None:
            raise ResultNotEncodable(f"{name}: {type(value).__name__} is no tensor of the Open Inference Protocol.")
        arrays[name] = array
        specs.append(TensorSpec(name, datatype, array.shape))
    try:
        outputs = _requested_outputs(request.head, list(arrays))
    except InvalidInput as error:  # the function has run: it is too late to refuse the request
        raise ResultNotEncodable(error.message) from None
    return encode(Request(request.head.id or "", {}, outputs), arrays, specs, model, version)


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
    offset = 0
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
            raise InvalidInput(f"{name}: {list(tensor.shape)} is not a valid shape", field=name)
        size = _binary_size(tensor, len(binary) - offset)
        if size is None:
            arrays[name] = _from_json(tensor, spec)
        else:
            arrays[name] = _from_bytes(tensor, spec, binary[offset : offset + size])
            offset += size
    if offset != len(binary):
        raise InvalidInput(f"{len(binary) - offset} bytes after the head belong to no input")
    return arrays


def _is_shape(sizes: tuple[int, ...]) -> bool:
    return all(0 <= size <= LARGEST_SIZE for size in sizes) and math.prod(size or 1 for size in sizes) < _MOST_ELEMENTS


def _binary_size(tensor: _Tensor, remaining: int) -> int | None:
    """Return the size of a binary tensor, or None if its data is in the JSON."""
    parameters = tensor.parameters or {}
    if "shared_memory_region" in parameters:
        raise InvalidInput(f"{tensor.name}: its shared memory region is not registered", field=tensor.name)
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if tensor.data is not None:
        raise InvalidInput(f"{tensor.name}: has both data and binary_data_size", field=tensor.name)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= remaining:
        shown = repr(size)[:40]
        raise InvalidInput(f"{tensor.name}: binary_data_size {shown}, but {remaining} bytes remain", field=tensor.name)
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
    offset = 0
    while offset < len(data):
        end = offset + _LENGTH.size
        if end <= len(data):
            end += _LENGTH.unpack_from(data, offset)[0]
        if end > len(data) or end < offset + _LENGTH.size:
            raise _wrong_size(tensor, f"{len(data)} bytes, with a truncated element,")
        yield bytes(data[offset + _LENGTH.size : end])
        offset = end


def _objects(elements: list[bytes]) -> Array:
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def _wrong_size(tensor: _Tensor, actual: str) -> InvalidInput:
    return InvalidInput(
        f"{tensor.name}: {actual} do not make {tensor.datatype}{list(tensor.shape)}, which has"
        f" {math.prod(tensor.shape)} elements",
        field=tensor.name,
    )


def _requested_outputs(head: _Head, names: list[str]) -> dict[str, bool]:
    default = bool((head.parameters or {}).get("binary_data_output", False))
    requested: dict[str, bool] = {}
    for output in head.outputs or ():
        name, parameters = output.name, output.parameters or {}
        if name not in names:
            raise InvalidInput(f"{name}: the model has no such output; it has {', '.join(names)}", field=name)
        if parameters.get("classification"):
            raise InvalidInput(f"{name}: classification is not supported", field=name)
        if "shared_memory_region" in parameters:
            raise InvalidInput(f"{name}: its shared memory region is not registered", field=name)
        requested[name] = bool(parameters.get("binary_data", default))
    return requested or dict.fromkeys(names, default)


# --- writing ---------------------------------------------------------------------------------------------------------


def _to_bytes(array: Array, datatype: str) -> bytes | memoryview:
    if datatype != "BYTES":
        block = contiguous(array)
        return block.reshape(-1).view(np.uint8).data if block.size else b""
    elements: list[str | bytes] = array.reshape(-1).tolist()
    encoded = (element if isinstance(element, bytes) else element.encode() for element in elements)
    return b"".join(part for element in encoded for part in (_LENGTH.pack(len(element)), element))


def _to_list(array: Array, datatype: str) -> list[Any]:
    flat = array.reshape(-1)
    if datatype == "BF16":
        # bfloat16 is the upper half of a float32.
        flat = (contiguous(flat).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elements: list[Any] = flat.tolist()
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        return [element if math.isfinite(element) else number_word(element) for element in elements]
    return elements
