"""Open Inference Protocol, V2: inference with the functions that are models, on the same hot path as invoke.

A request's body goes to the worker as it came, and its answer back; neither is taken apart here. What is looked at is
the header that tells where the JSON ends and the tensors begin. A version of a model is the number of its serving
revision; others do not run.
"""

from __future__ import annotations

import asyncio
import functools
import zlib
from typing import Final

import msgspec

from gpufn_core.encoding import media
from gpufn_core.errors import CapacityError, FunctionNotFound, GpufnError, InvalidInput, RevisionNotFound
from gpufn_core.spec.function_spec import Packaging, function_name
from gpufn_gateway.calls.admission import too_large
from gpufn_gateway.calls.call_bodies import CallBodies
from gpufn_gateway.calls.prepare import Arguments, Calls
from gpufn_gateway.functions.registry import Registry, Target
from gpufn_gateway.http.body_reader import Receive, Scope, Send
from gpufn_gateway.http.responses import OWN
from gpufn_gateway.problems import Headers, Problem
from gpufn_gateway.routes.invoke import Invoke

PREFIX: Final = "/v2"
_MODELS: Final = "/v2/models/"
_INFER: Final = "/infer"
_VERSIONS: Final = "/versions/"
_HEADER_LENGTH: Final = b"inference-header-content-length"
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32
_INLINE_BYTES: Final = 64 << 10  # more than this is unpacked beside the loop, which serves everybody


class ModelNotReady(CapacityError):
    """The model is being built."""


class _Oip:
    """Errors are `{"error": "..."}`, with the statuses that they have everywhere here."""

    def result(self, content_type: str, size: int) -> Headers:
        if media.media_type(content_type) != media.TENSORS:
            return OWN.result(content_type, size)
        length = (b"content-length", b"%d" % size)
        header_bytes = media.header_bytes(content_type)
        if header_bytes is None:
            return [(b"content-type", media.JSON.encode()), length]
        return [
            (b"content-type", media.BYTES.encode()),
            (_HEADER_LENGTH, b"%d" % header_bytes),
            length,
        ]

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        headers = [header for header in problem.headers() if header[0] != b"content-type"]
        headers.append((b"content-type", media.JSON.encode()))
        return problem.status, headers, msgspec.json.encode({"error": problem.info.message})


OIP: Final = _Oip()


def inference_of(path: str) -> tuple[str, str] | None:
    """The model and version, which may be empty, that a path asks inference of.

    >>> inference_of("/v2/models/resnet/infer"), inference_of("/v2/models/resnet/versions/3/infer")
    (('resnet', ''), ('resnet', '3'))
    """
    if not (path.startswith(_MODELS) and path.endswith(_INFER)):
        return None
    name, _, version = path[len(_MODELS) : -len(_INFER)].partition(_VERSIONS)
    return None if not name or "/" in name or "/" in version else (name, version)


def check_is_model(target: Target, version: str) -> None:
    """Raises FunctionNotFound for a function with code, RevisionNotFound for a version that does not serve."""
    if target.revision.spec.entry.packaging is not Packaging.MODEL:
        raise FunctionNotFound(f"{target.name} is no model; it is called at /v1/functions/{target.name}/invoke.")
    if version and version != str(target.number):
        raise RevisionNotFound(f"{target.name} serves version {target.number}, not {version[:20]}.")


def absent(registry: Registry, name: str) -> GpufnError:
    """Why there is no function of this name."""
    if registry.is_being_built(function_name(name)):
        return ModelNotReady(f"The model {name[:80]!r} is being built.")
    return FunctionNotFound(f"There is no model {name[:80]!r}.")


class Inference:
    def __init__(self, calls: Calls, invoke: Invoke, bodies: CallBodies) -> None:
        self._calls = calls
        self._invoke = invoke
        self._bodies = bodies

    async def serve(self, name: str, version: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises GpufnError while nothing has been sent."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        read = functools.partial(self._read, version)
        try:
            call = await self._calls.prepare(name, headers, receive, read=read)
        except FunctionNotFound as error:
            if function_name(name) in self._calls.registry.functions:
                raise
            raise absent(self._calls.registry, name) from error
        await self._invoke.answer(call, receive, send, OIP)

    async def _read(
        self, version: str, name: str, target: Target, headers: dict[bytes, bytes], receive: Receive
    ) -> Arguments:
        check_is_model(target, version)
        encoding = headers.get(b"content-encoding", b"identity").lower()
        if encoding == b"identity":
            body = await self._bodies.take(headers, receive, function=target.name, may_be_parcel=True)
        else:
            packed = await self._bodies.read(headers, receive, may_be_parcel=False)
            unpacked = await self._unpacked(packed, encoding)
            body = self._bodies.wrap(unpacked, function=target.name, may_be_parcel=True)
        length = headers.get(_HEADER_LENGTH)
        if length is not None and not (length.isdigit() and len(length) < 18 and int(length) <= body.size):
            self._bodies.discard(body)
            raise InvalidInput("Inference-Header-Content-Length is not the length of a part of the body.")
        content_type = media.tensors(None if length is None else int(length))
        return Arguments(content_type, media.TENSORS, body)

    async def _unpacked(self, body: bytes, encoding: bytes) -> bytes:
        if encoding not in (b"gzip", b"deflate"):
            raise InvalidInput("Content-Encoding is gzip or deflate here, or absent.")
        limit_bytes = self._bodies.limit_bytes
        if len(body) <= _INLINE_BYTES:
            return _unpack(body, limit_bytes)
        return await asyncio.to_thread(_unpack, body, limit_bytes)


def _unpack(body: bytes, limit_bytes: int) -> bytes:
    """Stops at `limit_bytes`, however much the body would come to."""
    unpacking = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        unpacked = unpacking.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise InvalidInput(f"The body is not what its Content-Encoding says: {error}.") from None
    if len(unpacked) > limit_bytes:
        raise too_large("a call's arguments", limit_bytes)
    if not unpacking.eof or unpacking.unused_data:
        raise InvalidInput("The body is not what its Content-Encoding says: it is not one whole piece.")
    return unpacked
