"""Validation of an uploaded model: is it an ONNX model, and does it refer only to its own files?

    1. The files: number and sizes as in the spec, regular files in one folder.
    2. The bytes: complete ONNX, not another format, not truncated.
    3. Every message of the protobuf, at any depth: external data, domains, sizes, nesting.
    4. Opsets that the runtime supports, inputs and outputs that a request can name, inputs of known rank.

Only the ONNX file is opened here, and onnx does not access external data before step 3 has passed.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import onnx
from google.protobuf.message import DecodeError, Message
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from gpufn_builder.onnx_model import file_format, ort_capabilities, signature
from gpufn_builder.onnx_model.graph_names import text
from gpufn_builder.onnx_model.tensors import MAX_ELEMENTS
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ModelSpec

_STAGE: Final = BuildStage.INGEST
_MAIN: Final = ("", "ai.onnx")  # two names of one domain
_EXPORT_HINT: Final = "export the model to ONNX"


class IngestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one upload. ModelSpec limits the number of files."""

    model_bytes: int = (2 << 30) - 1  # the ONNX file; the limit of a protobuf
    total_bytes: int = 64 << 30
    nodes: int = 200_000  # after inlining of functions
    nesting: int = 16  # of graphs in graphs, and of function calls
    elements: int = MAX_ELEMENTS


@dataclass(frozen=True)
class SourceModel:
    """A valid model: the ONNX file `name` and its external data, `external`, are in `folder`."""

    folder: Path
    name: str
    external: tuple[str, ...]
    proto: ModelProto  # external data not loaded
    nodes: int

    @property
    def path(self) -> Path:
        return self.folder / self.name


def ingest(folder: Path, spec: ModelSpec, limits: IngestLimits) -> SourceModel:
    """Validate the model of `spec`, whose files are in `folder`. Raises BuildFailed(stage="ingest")."""
    sizes = _sizes(folder, spec, limits)
    name = spec.files[0].name
    proto = _parse(name, (folder / name).read_bytes())
    walk = _Walk({other: size for other, size in sizes.items() if other != name}, proto, limits)
    walk.visit(proto, owner="", depth=0)
    nodes = _count_nodes(proto, limits)
    _check_opsets(proto)
    signature.check(proto.graph)
    return SourceModel(folder, name, tuple(sorted(walk.external)), proto, nodes)


# --- files ------------------------------------------------------------------------------------------------------------


def _sizes(folder: Path, spec: ModelSpec, limits: IngestLimits) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for file in spec.files:
        try:
            status = (folder / file.name).lstat()
        except OSError as error:
            raise _error(f"{file.name} is missing: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
            raise _error(f"{file.name} is {kind}")
        if status.st_nlink > 1:
            raise _error(f"{file.name} is a hard link: another path refers to the same file")
        if status.st_size != file.size:
            raise _error(f"{file.name} has {status.st_size} bytes, not the {file.size} in the spec")
        sizes[file.name] = status.st_size
    model = spec.files[0].name
    if sizes[model] > limits.model_bytes:
        raise _error(
            f"{model} has {sizes[model]} bytes, and {limits.model_bytes} are allowed: keep weights as external data"
        )
    if (total := sum(sizes.values())) > limits.total_bytes:
        raise _error(f"the model's files have {total} bytes together, and {limits.total_bytes} are allowed")
    return sizes


def _parse(name: str, data: bytes) -> ModelProto:
    if not data:
        raise _error(f"{name} is empty")
    if (kind := file_format.other_kind(data)) is not None:
        raise _error(f"{name} is not ONNX but {kind}: {_EXPORT_HINT}")
    missing = file_format.missing_bytes(data)
    if missing is None:
        raise _error(f"{name} is not ONNX: {_EXPORT_HINT}")
    if missing:
        raise _error(f"{name} is truncated: at least {missing} bytes are missing at its end")
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError:
        raise _error(f"{name} is damaged, or nested too deeply: it cannot be parsed as ONNX") from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise _error(f"{name} is not a complete ONNX model: it has no graph or no opset")
    return proto


# --- the walk ---------------------------------------------------------------------------------------------------------


class _Walk:
    """Visits every message of a model once. `external` collects the files of its tensors."""

    def __init__(self, sizes: Mapping[str, int], model: ModelProto, limits: IngestLimits) -> None:
        self._sizes = sizes
        self._limits = limits
        self._functions = {_key(function) for function in model.functions}
        self.external: set[str] = set()

    def visit(self, message: Message, owner: str, depth: int) -> None:
        match message:
            case TensorProto():
                self._check_tensor(message, owner)
                return
            case NodeProto():
                owner = _called(message)
                self._check_domain(message, owner)
            case GraphProto():
                depth += 1
                if depth > self._limits.nesting:
                    raise _error(f"graphs are nested {depth} deep; {self._limits.nesting} are allowed", owner)
        for child in _children(message):
            self.visit(child, owner, depth)

    def _check_domain(self, node: NodeProto, owner: str) -> None:
        domain = node.domain
        if domain in _MAIN or domain in ort_capabilities.domains() or _call_key(node) in self._functions:
            return
        raise _error(
            f"node {owner} is {domain}.{node.op_type}: operators of the domain {domain} are unknown here", owner
        )

    def _check_tensor(self, tensor: TensorProto, owner: str) -> None:
        name = tensor.name or f"a tensor of {owner or 'the model'}"
        if any(size < 0 for size in tensor.dims):
            raise _error(f"{name} has the shape {list(tensor.dims)}", owner)
        if tensor.HasField("segment"):
            raise _error(f"{name} is one of several segments, which ONNX Runtime does not support", owner)
        elements = math.prod(tensor.dims)
        if elements > self._limits.elements:
            raise _error(f"{name} has {elements} elements; {self._limits.elements} are allowed", owner)
        if tensor.data_location == TensorProto.EXTERNAL or tensor.external_data:
            self._check_external(tensor, name, elements, owner)

    def _check_external(self, tensor: TensorProto, name: str, elements: int, owner: str) -> None:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if len(entries) < len(tensor.external_data):
            raise _error(f"{name}: its external data has a duplicate entry", owner)
        location = entries.get("location", "")
        if not location or location in (".", "..") or set(location) & set("/\\\0"):
            raise _error(
                f"{name}: its external data {location[:120]!r} is not a plain file name beside the model", owner
            )
        if location not in self._sizes:
            raise _error(f"{name}: its external data {location[:120]!r} was not uploaded with the model", owner)
        offset = _count(entries, "offset", name, owner) or 0
        needed = _bytes_of(tensor.data_type, elements)
        if needed is None:
            raise _error(f"{name}: elements of type {tensor.data_type} cannot be external data", owner)
        length = _count(entries, "length", name, owner)
        end = offset + max(needed, length or 0)
        if end > self._sizes[location]:
            raise _error(
                f"{name}: its external data ends at byte {end} of {location}, which has {self._sizes[location]}", owner
            )
        self.external.add(location)


def _children(message: Message) -> Iterator[Message]:
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if isinstance(value, Message):
            yield value
        else:
            yield from value


def _count(entries: Mapping[str, str], key: str, name: str, owner: str) -> int | None:
    text = entries.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise _error(f"{name}: the {key} of its external data is {text[:40]!r}", owner)
    return int(text)


def _bytes_of(element_type: int, elements: int) -> int | None:
    """Return the size of the elements; None for text, which has no fixed size, and for unknown types."""
    if element_type == TensorProto.STRING:
        return None
    try:
        itemsize = onnx.helper.tensor_dtype_to_np_dtype(element_type).itemsize
    except (KeyError, ValueError, TypeError):
        return None
    per_byte = {"INT4": 2, "UINT4": 2, "FLOAT4E2M1": 2, "INT2": 4, "UINT2": 4}.get(
        TensorProto.DataType.Name(element_type), 1
    )
    return -(-elements * itemsize // per_byte)


# --- the whole model --------------------------------------------------------------------------------------------------


def _count_nodes(model: ModelProto, limits: IngestLimits) -> int:
    """Count the nodes after inlining of functions, as in the normalized model."""
    functions = {_key(function): function for function in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}

    def size_of(message: Message, calls: tuple[tuple[str, str, str], ...]) -> int:
        total = 0
        for node in all_nodes(message):
            key = _call_key(node)
            if key not in functions:
                total += 1
            elif key in calls:
                raise _error(f"the function {key[0]}.{key[1]} calls itself", _called(node))
            elif len(calls) >= limits.nesting:
                raise _error(f"functions call each other more than {limits.nesting} deep", _called(node))
            else:
                if key not in sizes:
                    sizes[key] = size_of(functions[key], (*calls, key))
                total += sizes[key]
            if total > limits.nodes:
                raise _error(f"the model has more than {limits.nodes} nodes")
        return total

    return size_of(model.graph, ())


def all_nodes(message: Message) -> Iterator[NodeProto]:
    """Yield all nodes of a graph or function, including subgraphs."""
    for child in _children(message):
        if isinstance(child, TensorProto):
            continue
        if isinstance(child, NodeProto):
            yield child
        yield from all_nodes(child)


def used_domains(model: ModelProto) -> set[str]:
    """Return the domains of the nodes in the graph and in the model's functions; the main domain is ""."""
    return {canonical_domain(node.domain) for holder in (model.graph, *model.functions) for node in all_nodes(holder)}


def canonical_domain(domain: str) -> str:
    """Return the canonical name of a domain; the main domain has two names."""
    return "" if domain in _MAIN else domain


def main_opset(model: ModelProto) -> int:
    """Return the opset of the main domain; 0 if it is not imported."""
    return max((each.version for each in model.opset_import if each.domain in _MAIN), default=0)


def _check_opsets(model: ModelProto) -> None:
    used = used_domains(model)
    for holder in (model, *model.functions):
        for opset in holder.opset_import:
            domain = canonical_domain(opset.domain)
            if domain not in used or domain not in ort_capabilities.domains():
                continue  # an unused domain, or the domain of the model's own functions
            newest = ort_capabilities.newest_opset(domain)
            if opset.version > newest:
                raise _error(
                    f"the model uses opset {opset.version} of {domain or 'ai.onnx'}, and this runtime supports opsets "
                    f"up to {newest}: export it with opset_version={newest}"
                )


def _key(function: FunctionProto) -> tuple[str, str, str]:
    return function.domain, function.name, function.overload


def _call_key(node: NodeProto) -> tuple[str, str, str]:
    return node.domain, node.op_type, node.overload


def _called(node: NodeProto) -> str:
    """Return the name of a node for errors. Exporters may omit names."""
    outputs: Any = [text(name) for name in node.output if name]
    return text(node.name) or (f"{node.op_type} -> {outputs[0]}" if outputs else node.op_type)


def _error(message: str, node: str = "") -> BuildFailed:
    return BuildFailed(message, stage=_STAGE, node=node)
