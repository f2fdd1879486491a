"""Messages of the protocol over gRPC, as requests and responses of its HTTP form. Pure.

Tensors stay bytes: `raw_input_contents` follow the JSON head of a binary request, and the tensors of a binary response
become `raw_output_contents`. Typed contents (`fp32_contents` and the others) are packed first.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from google.protobuf import json_format
from google.protobuf.message import Message

from gpufn_core.errors import InvalidInput
from gpufn_gateway.oip.grpc import messages_pb2 as messages

_LENGTH: Final = struct.Struct("<I")
_BINARY_OUTPUTS: Final = "binary_data_output"
_REGION: Final = "shared_memory_region"


def _packed(code: str) -> Callable[[Iterable[Any]], bytes]:
    return lambda values: array.array(code, values).tobytes()


def _strings(values: Iterable[bytes]) -> bytes:
    """Return the elements of a BYTES tensor, each after its length."""
    return b"".join(part for value in values for part in (_LENGTH.pack(len(value)), value))


# Datatype → field of the typed contents, and how its values become the tensor's bytes. FP16 and BF16 have none.
_CONTENTS: Final[Mapping[str, tuple[str, Callable[[Iterable[Any]], bytes]]]] = {
    "BOOL": ("bool_contents", bytes),
    "INT8": ("int_contents", _packed("b")),
    "INT16": ("int_contents", _packed("h")),
    "INT32": ("int_contents", _packed("i")),
    "INT64": ("int64_contents", _packed("q")),
    "UINT8": ("uint_contents", _packed("B")),
    "UINT16": ("uint_contents", _packed("H")),
    "UINT32": ("uint_contents", _packed("I")),
    "UINT64": ("uint64_contents", _packed("Q")),
    "FP32": ("fp32_contents", _packed("f")),
    "FP64": ("fp64_contents", _packed("d")),
    "BYTES": ("bytes_contents", _strings),
}


def inference_body(request: messages.ModelInferRequest) -> tuple[int, list[bytes]]:
    """Return the body of a binary inference request: the length of its head, and its parts. Raises InvalidInput."""
    tensors = _tensor_bytes(request)
    contents = iter(tensors)
    inputs = []
    for tensor in request.inputs:
        parameters = _parameters(tensor.parameters)
        if _REGION not in tensor.parameters:
            parameters["binary_data_size"] = len(next(contents))
        inputs.append(
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": parameters,
            }
        )
    head: dict[str, Any] = {"inputs": inputs, "parameters": _parameters(request.parameters)}
    if request.id:
        head["id"] = request.id
    if request.outputs:
        head["outputs"] = [
            {"name": output.name, "parameters": {**_parameters(output.parameters), "binary_data": True}}
            for output in request.outputs
        ]
    else:
        head["parameters"][_BINARY_OUTPUTS] = True
    text = msgspec.json.encode(head)
    return len(text), [text, *tensors]


def inference_response(head_bytes: int, body: bytes) -> messages.ModelInferResponse:
    """Return the response of a binary inference. Every output is binary, since the request demanded it, or in shared
    memory. An output in shared memory has empty contents, since clients count them."""
    head = msgspec.json.decode(body[:head_bytes])
    response = messages.ModelInferResponse(
        model_name=head["model_name"], model_version=head["model_version"], id=head.get("id", "")
    )
    at = head_bytes
    for output in head["outputs"]:
        added = response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        parameters = output["parameters"]
        if _REGION in parameters:
            for name, value in parameters.items():
                _set(added.parameters[name], value)
        end = at + parameters.get("binary_data_size", 0)
        response.raw_output_contents.append(body[at:end])
        at = end
    return response


def from_json(body: bytes, response: Message, *, field: str = "") -> None:
    """Fill a response from the JSON of the HTTP form, or one field of the response. Unknown fields are ignored."""
    value = msgspec.json.decode(body)
    json_format.ParseDict({field: value} if field else value, response, ignore_unknown_fields=True)


def by_name(regions: bytes) -> bytes:
    """Return a JSON list of regions as an object by their names."""
    return msgspec.json.encode({region["name"]: region for region in msgspec.json.decode(regions)})


def registration(request: messages.SystemSharedMemoryRegisterRequest) -> bytes:
    """Return the body of the registration of a region."""
    return msgspec.json.encode({"key": request.key, "offset": request.offset, "byte_size": request.byte_size})


def model_change(request: messages.RepositoryModelRequest) -> bytes:
    """Return the body of a request that loads or unloads a model."""
    return msgspec.json.encode({"parameters": _parameters(request.parameters)})


def _tensor_bytes(request: messages.ModelInferRequest) -> Sequence[bytes]:
    """Return the bytes of the inputs that are not in shared memory."""
    raw = request.raw_input_contents
    inputs = [tensor for tensor in request.inputs if _REGION not in tensor.parameters]
    if not raw:
        return [_typed_bytes(tensor) for tensor in inputs]
    if len(raw) != len(inputs):
        raise InvalidInput(
            f"raw_input_contents has {len(raw)} tensors, and inputs has {len(inputs)} outside of regions"
        )
    if any(tensor.HasField("contents") for tensor in request.inputs):
        raise InvalidInput("an inference request has raw_input_contents or contents, not both")
    return raw


def _typed_bytes(tensor: messages.ModelInferRequest.InferInputTensor) -> bytes:
    if tensor.datatype not in _CONTENTS:
        raise InvalidInput(f"{tensor.name}: send {tensor.datatype[:20]!r} as raw_input_contents", field=tensor.name)
    field, pack = _CONTENTS[tensor.datatype]
    others = [other.name for other, _ in tensor.contents.ListFields() if other.name != field]
    if others:
        raise InvalidInput(f"{tensor.name}: {tensor.datatype} is in {field}, not in {others[0]}", field=tensor.name)
    try:
        return pack(getattr(tensor.contents, field))
    except OverflowError:
        raise InvalidInput(f"{tensor.name}: a value does not fit {tensor.datatype}", field=tensor.name) from None


def _parameters(
    given: Mapping[str, messages.InferParameter] | Mapping[str, messages.ModelRepositoryParameter],
) -> dict[str, Any]:
    values = {}
    for name, parameter in given.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None:
            values[name] = getattr(parameter, choice)
    return values


def _set(parameter: messages.InferParameter, value: str | int) -> None:
    if isinstance(value, str):
        parameter.string_param = value
    else:
        parameter.int64_param = value
