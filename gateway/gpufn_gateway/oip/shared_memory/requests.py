"""Inference requests whose tensors are in regions, as requests of the binary extension. Workers know no regions.

The head is rewritten. An input in a region becomes a binary tensor, whose bytes are read from the region. A requested
output in a region becomes a binary output, which `responses` writes there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_gateway.http.body_reader import Write
from gpufn_gateway.oip.shared_memory.regions import Regions, Slice

# A request with regions is decoded in the event loop, and so is its response. Large tensors are not in their JSON.
MAX_TENSORS: Final = 256  # per request
MAX_HEAD_BYTES: Final = 1 << 20
_MARK: Final = b"shared_memory_region"
_PART_BYTES: Final = 256 << 10  # read at a time: it stays in the processor's cache while it is copied
_OF_REGIONS: Final = frozenset({"shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"})

_Raw = dict[str, msgspec.Raw]


class _Head(msgspec.Struct):
    inputs: list[_Raw]
    outputs: list[_Raw] | None = None


class Range(NamedTuple):
    """Bytes of the request's own body."""

    start: int
    end: int


class Request(NamedTuple):
    """A rewritten request: its head, where the bytes of its tensors are, and the outputs that go to regions."""

    head: bytes
    tensors: list[Range | Slice]
    outputs: dict[str, Slice]

    @property
    def size(self) -> int:
        return len(self.head) + sum(_size(tensor) for tensor in self.tensors)


async def names_regions(head: memoryview) -> bool:
    """Return whether a head may name regions. Most heads do not, and need not be decoded."""
    for start in range(0, len(head), _PART_BYTES):
        if start:
            await asyncio.sleep(0)  # others get their turn
        if _MARK in bytes(head[start : start + _PART_BYTES + len(_MARK) - 1]):
            return True
    return False


def rewrite(head: bytes, binary: Range, regions: Regions, owner: str) -> Request | None:
    """Return the request without regions, or None if it names none. `binary` are the bytes behind the head.

    Raises InvalidInput, DataNotFound.
    """
    if len(head) > MAX_HEAD_BYTES:
        raise InvalidInput(f"the JSON of a request with shared memory has at most {MAX_HEAD_BYTES:,} bytes")
    try:
        fields = msgspec.json.decode(head, type=_Raw)
        parsed = msgspec.json.decode(head, type=_Head)
        if len(parsed.inputs) + len(parsed.outputs or ()) > MAX_TENSORS:
            raise InvalidInput(f"a request with shared memory has at most {MAX_TENSORS} tensors")
        rewriting = _Rewriting(regions, owner, binary)
        inputs = [rewriting.input(tensor) for tensor in parsed.inputs]
        outputs = [rewriting.output(tensor) for tensor in parsed.outputs or ()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # the worker reports the error
    if not rewriting.has_regions:
        return None
    rewriting.check_end()
    changed: dict[str, Any] = {**fields, "inputs": inputs}
    if outputs:
        changed["outputs"] = outputs
    return Request(msgspec.json.encode(changed), rewriting.tensors, rewriting.outputs)


class _Rewriting:
    def __init__(self, regions: Regions, owner: str, binary: Range) -> None:
        self._regions = regions
        self._owner = owner
        self._binary = binary
        self.tensors: list[Range | Slice] = []
        self.outputs: dict[str, Slice] = {}
        self.has_regions = False

    def input(self, tensor: _Raw) -> dict[str, Any]:
        parameters = _parameters(tensor)
        if "shared_memory_region" not in parameters:
            self._skip(parameters.get("binary_data_size"))
            return dict(tensor)
        piece = self._slice(tensor, parameters)
        if "data" in tensor or "binary_data_size" in parameters:
            raise InvalidInput(f"{_name(tensor)}: has both shared memory and data", field=_name(tensor))
        self.tensors.append(piece)
        return {**tensor, "parameters": {**_others(parameters), "binary_data_size": piece.size}}

    def output(self, tensor: _Raw) -> dict[str, Any]:
        parameters = _parameters(tensor)
        if "shared_memory_region" not in parameters:
            return dict(tensor)
        piece, name = self._slice(tensor, parameters), _name(tensor)
        if name in self.outputs:
            raise InvalidInput(f"{name}: requested twice", field=name)
        self.outputs[name] = piece
        return {**tensor, "parameters": {**_others(parameters), "binary_data": True}}

    def check_end(self) -> None:
        """Raise InvalidInput for bytes that belong to no input."""
        if self._binary.start != self._binary.end:
            raise InvalidInput(f"{self._binary.end - self._binary.start} bytes after the head belong to no input")

    def _skip(self, size: object) -> None:
        """Take the bytes of a binary tensor from the body."""
        if size is None:
            return
        remaining = self._binary.end - self._binary.start
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= remaining:
            raise InvalidInput(f"a binary_data_size is {str(size)[:40]}, but {remaining} bytes remain")
        middle = self._binary.start + size
        self.tensors.append(Range(self._binary.start, middle))
        self._binary = Range(middle, self._binary.end)

    def _slice(self, tensor: _Raw, parameters: Mapping[str, Any]) -> Slice:
        self.has_regions = True
        return self._regions.slice_of(self._owner, parameters, _name(tensor))


class RequestBody:
    """The body of a rewritten request, as an ASGI receive: the regions are read while the body is received."""

    def __init__(self, request: Request, body: bytes | memoryview, regions: Regions) -> None:
        self._request = request
        self._body = memoryview(body)
        self._regions = regions
        self._buffer = memoryview(bytearray(_PART_BYTES))
        self._parts = self._read()
        self._remaining = request.size

    async def __call__(self) -> dict[str, Any]:
        part = bytes(next(self._parts, b""))
        self._remaining -= len(part)
        await asyncio.sleep(0)  # others get their turn while a large body is read
        return {"type": "http.request", "body": part, "more_body": self._remaining > 0}

    async def write_into(self, write: Write) -> None:
        for part in self._parts:
            write(part)
            await asyncio.sleep(0)

    def _read(self) -> Iterator[bytes | memoryview]:
        """Yield the parts, each valid until the next one. Raises InvalidInput."""
        yield self._request.head
        for tensor in self._request.tensors:
            if isinstance(tensor, Range):
                for start in range(tensor.start, tensor.end, _PART_BYTES):
                    yield self._body[start : min(start + _PART_BYTES, tensor.end)]
                continue
            for at in range(0, tensor.size, _PART_BYTES):
                part = self._buffer[: min(_PART_BYTES, tensor.size - at)]
                self._regions.read_into(part, tensor, at)
                yield part


def _parameters(tensor: _Raw) -> dict[str, Any]:
    raw = tensor.get("parameters")
    return {} if raw is None else msgspec.json.decode(raw, type=dict[str, Any] | None) or {}


def _others(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name not in _OF_REGIONS}


def _name(tensor: _Raw) -> str:
    return msgspec.json.decode(tensor.get("name", msgspec.Raw(b'""')), type=str)


def _size(tensor: Range | Slice) -> int:
    return tensor.end - tensor.start if isinstance(tensor, Range) else tensor.size
