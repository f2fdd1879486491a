"""Inference responses whose outputs go to regions: an ASGI send that writes them there instead of to the client.

The response starts when all outputs of regions are written, or with the first bytes that the client receives. So an
error of a region is a normal error, unless the client also receives binary outputs in front of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, NamedTuple

import msgspec

from gpufn_core.errors import ArtifactUnavailable, InvalidInput
from gpufn_gateway.http.body_reader import Send
from gpufn_gateway.oip.shared_memory.regions import Regions, Slice
from gpufn_gateway.oip.shared_memory.requests import MAX_HEAD_BYTES

HEADER_LENGTH: Final = b"inference-header-content-length"
_YIELD_BYTES: Final = 256 << 10


class _Tensor(NamedTuple):
    """A binary output; without a slice the client receives it."""

    size: int
    piece: Slice | None


class ResponseSend:
    """Sends a response without the bytes of `outputs`, which it writes to their slices."""

    def __init__(self, send: Send, outputs: Mapping[str, Slice], regions: Regions, owner: str) -> None:
        self._send = send
        self._outputs = outputs
        self._regions = regions
        self._owner = owner
        self._start: MutableMapping[str, Any] | None = None
        self._head_bytes = 0
        self._head = bytearray()
        self._tensors: deque[_Tensor] | None = None  # once the head is complete
        self._written = 0  # bytes written of the first of them

    async def __call__(self, event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            length = dict(event["headers"]).get(HEADER_LENGTH)
            if event["status"] == 200 and length is not None:
                self._start, self._head_bytes = event, int(length)
                if self._head_bytes > MAX_HEAD_BYTES:
                    raise InvalidInput(
                        f"the JSON of a response with shared memory has at most {MAX_HEAD_BYTES:,} bytes: request the "
                        "other outputs as binary data"
                    )
                return
        if self._head_bytes == 0:  # an error, or a response without binary outputs
            await self._send(event)
            return
        rest = memoryview(event.get("body", b""))
        if self._tensors is None:
            missing = self._head_bytes - len(self._head)
            self._head += rest[:missing]
            rest = rest[missing:]
            if len(self._head) == self._head_bytes:
                self._read_head()
        while rest:
            rest = await self._take(rest)
        if not event.get("more_body", False):
            if self._tensors is None or any(tensor.size for tensor in self._tensors):
                raise ArtifactUnavailable("A worker's response is shorter than its head declares.")
            await self._begin()
            await self._send({"type": "http.response.body", "body": b""})

    def _read_head(self) -> None:
        """Find where the outputs go, and remove the sizes of those for regions. Raises ArtifactUnavailable,
        InvalidInput."""
        try:
            head = msgspec.json.decode(self._head, type=dict[str, Any])
            tensors = deque(self._tensor(output) for output in head["outputs"] if _binary_size(output) is not None)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
            raise ArtifactUnavailable("A worker's response is no inference response.") from None
        self._head = bytearray(msgspec.json.encode(head))
        assert self._start is not None
        size = len(self._head) + sum(tensor.size for tensor in tensors if tensor.piece is None)
        given = [each for each in self._start["headers"] if each[0] not in (HEADER_LENGTH, b"content-length")]
        lengths = [(HEADER_LENGTH, b"%d" % len(self._head)), (b"content-length", b"%d" % size)]
        self._start["headers"] = [*given, *lengths]
        self._tensors = tensors

    def _tensor(self, output: dict[str, Any]) -> _Tensor:
        size, piece = _binary_size(output), self._outputs.get(output["name"])
        if not isinstance(size, int) or size < 0:
            raise TypeError
        if piece is None:
            return _Tensor(size, None)
        if size > piece.size:
            raise InvalidInput(
                f"{output['name']}: the output has {size} bytes, more than the {piece.size} of its shared memory",
                field=output["name"],
            )
        output["parameters"] = {
            "shared_memory_region": piece.region.name,
            "shared_memory_offset": piece.offset,
            "shared_memory_byte_size": size,
        }
        return _Tensor(size, piece)

    async def _take(self, part: memoryview) -> memoryview:
        """Take bytes of the first tensor, and return the others."""
        while self._tensors and self._written == self._tensors[0].size:
            self._tensors.popleft()
            self._written = 0
        if not self._tensors:
            raise ArtifactUnavailable("A worker's response is longer than its head declares.")
        tensor = self._tensors[0]
        own = part[: tensor.size - self._written]
        if tensor.piece is None:
            await self._begin()
            await self._send({"type": "http.response.body", "body": own, "more_body": True})
        else:
            self._regions.write(own, self._owner, tensor.piece, self._written)
            if len(own) >= _YIELD_BYTES:
                await asyncio.sleep(0)
        self._written += len(own)
        if self._written == tensor.size:
            self._tensors.popleft()
            self._written = 0
        return part[len(own) :]

    async def _begin(self) -> None:
        if self._start is not None:
            await self._send(self._start)
            await self._send({"type": "http.response.body", "body": bytes(self._head), "more_body": True})
            self._start = None


def _binary_size(output: dict[str, Any]) -> Any:
    return (output.get("parameters") or {}).get("binary_data_size")
