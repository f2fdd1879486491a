"""Open Inference Protocol V2: inference with models, and with functions that take arrays. The hot path is invoke's.

The body is passed to the worker unchanged, and so is the response; neither is decoded here, unless tensors are in
shared memory. The gateway reads only the header that has the length of the JSON before the tensors. The version of a
model is the number of a revision that gets calls: the serving one, or a revision of a split (`gpufn traffic`). Other
revisions cannot be called.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

import msgspec

from gpufn_core.encoding import media
from gpufn_core.errors import CapacityError, FunctionNotFound, GpufnError, InvalidInput, RevisionNotFound
from gpufn_core.spec.function_spec import FunctionSpec, MethodSpec, Packaging
from gpufn_core.spec.naming import names
from gpufn_core.spec.tensor_signature import takes_tensors
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.calls.admission import too_large
from gpufn_gateway.calls.arguments import Arguments
from gpufn_gateway.calls.call_bodies import CallBodies
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.target import Target
from gpufn_gateway.http.body_reader import Receive, Scope, Send
from gpufn_gateway.http.responses import GPUFN_FORMAT
from gpufn_gateway.oip.shared_memory.exchange import Exchange, InferenceBody
from gpufn_gateway.oip.shared_memory.regions import Regions
from gpufn_gateway.oip.shared_memory.responses import HEADER_LENGTH
from gpufn_gateway.problems import Headers, Problem
from gpufn_gateway.routes.calls.invoke import Invoke

PREFIX: Final = "/v2"
_MODELS: Final = "/v2/models/"
_INFER: Final = "/infer"
_VERSIONS: Final = "/versions/"
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32
_INLINE_BYTES: Final = 64 << 10  # larger bodies are decompressed in a thread, so that the event loop is not blocked


class ModelNotReady(CapacityError):
    """The model is being built."""


class _OipFormat:
    """Response format of the protocol: errors are `{"error": "..."}`, with the same statuses as in the gpufn API."""

    def result(self, content_type: str, size: int) -> Headers:
        if media.media_type(content_type) != media.TENSORS:
            return GPUFN_FORMAT.result(content_type, size)
        length = (b"content-length", b"%d" % size)
        header_bytes = media.header_bytes(content_type)
        if header_bytes is None:
            return [(b"content-type", media.JSON.encode()), length]
        return [(b"content-type", media.BYTES.encode()), (HEADER_LENGTH, b"%d" % header_bytes), length]

    def refusal(self, problem: Problem) -> tuple[int, Headers, bytes]:
        headers = [header for header in problem.headers() if header[0] != b"content-type"]
        headers.append((b"content-type", media.JSON.encode()))
        return problem.status, headers, msgspec.json.encode({"error": problem.info.message})


OIP_FORMAT: Final = _OipFormat()


def parse_inference_path(path: str) -> tuple[str, str] | None:
    """Parse the path of an inference request into model and version, which may be empty. None for other paths.

    >>> parse_inference_path("/v2/models/resnet/infer"), parse_inference_path("/v2/models/resnet/versions/3/infer")
    (('resnet', ''), ('resnet', '3'))
    >>> parse_inference_path("/v2/models/prod/search/resnet/infer")
    ('prod/search/resnet', '')
    """
    if not (path.startswith(_MODELS) and path.endswith(_INFER)):
        return None
    name, _, version = path[len(_MODELS) : -len(_INFER)].partition(_VERSIONS)
    return None if not names.IN_PATH.fullmatch(name) or "/" in version else (name, version)


def is_model(spec: FunctionSpec, method: MethodSpec) -> bool:
    """Return whether the protocol can call this method: the method of a model, or a method with arrays."""
    return spec.entry.packaging is Packaging.MODEL or takes_tensors(method)


def check_is_model(target: Target, version: str) -> None:
    """Raises FunctionNotFound for a function without arrays, RevisionNotFound for a version that does not serve."""
    if not is_model(target.revision.spec, target.method):
        raise FunctionNotFound(
            f"{target.path} is not a model, and takes no arrays; call it at /v1/functions/{target.path}/invoke."
        )
    if version and version != str(target.number):
        raise RevisionNotFound(f"{target.name} serves version {target.number}, not {version[:20]}.")


def model_error(error: FunctionNotFound, name: str, registry: Registry, principal: Principal) -> GpufnError:
    """Return the error for a name that cannot be called. `error` is the one of a function."""
    try:
        full = registry.find(name, principal)
    except FunctionNotFound:
        return FunctionNotFound(f"There is no model {names.shown(name)}.")
    return error if full in registry.functions else ModelNotReady(f"The model {names.shown(name)} is being built.")


class Inference:
    """`regions`: the shared memory of clients, or None if the operator does not allow any."""

    def __init__(self, calls: Calls, invoke: Invoke, bodies: CallBodies, regions: Regions | None = None) -> None:
        self._calls = calls
        self._invoke = invoke
        self._bodies = bodies
        self._regions = regions

    async def serve(self, name: str, version: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an inference request. Raises GpufnError before the response has started."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        exchange = Exchange(self._regions, self._calls.access, self._bodies, scope) if self._regions else None

        async def read(_: str, target: Target, headers: dict[bytes, bytes], receive: Receive) -> Arguments:
            received = await self._receive(version, target, headers, receive)
            if exchange is not None:
                received = await exchange.with_inputs(received)
            return Arguments(media.tensors(received.head_bytes), media.TENSORS, received.body)

        try:
            call = await self._calls.prepare(name, headers, receive, read=read, revision=version)
        except FunctionNotFound as error:
            principal = self._calls.access.authenticate(headers)
            raise model_error(error, name, self._calls.registry, principal) from None
        if exchange is not None:
            send = exchange.sending(send)
        await self._invoke.respond(call, receive, send, OIP_FORMAT)

    async def _receive(
        self, version: str, target: Target, headers: dict[bytes, bytes], receive: Receive
    ) -> InferenceBody:
        check_is_model(target, version)
        encoding = headers.get(b"content-encoding", b"identity").lower()
        if encoding == b"identity":
            body = await self._bodies.receive_body(headers, receive, may_share=True)
        else:
            compressed = await self._bodies.read(headers, receive, may_share=False)
            decompressed = await self._decompress_body(compressed, encoding)
            body = self._bodies.wrap(decompressed, may_share=True)
        length = headers.get(HEADER_LENGTH)
        if length is not None and not (length.isdigit() and len(length) < 18 and int(length) <= body.size):
            self._bodies.discard(body)
            raise InvalidInput("Inference-Header-Content-Length must be a length within the body.")
        return InferenceBody(body, None if length is None else int(length))

    async def _decompress_body(self, body: bytes, encoding: bytes) -> bytes:
        if encoding not in (b"gzip", b"deflate"):
            raise InvalidInput("Content-Encoding must be gzip, deflate or absent.")
        limit_bytes = self._bodies.limit_bytes
        if len(body) <= _INLINE_BYTES:
            return _decompress(body, limit_bytes)
        return await asyncio.to_thread(_decompress, body, limit_bytes)


def _decompress(body: bytes, limit_bytes: int) -> bytes:
    """Decompress a body, but not beyond `limit_bytes`. Raises PayloadTooLarge, InvalidInput."""
    decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        decompressed = decompressor.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise InvalidInput(f"The body does not match its Content-Encoding: {error}.") from None
    if len(decompressed) > limit_bytes:
        raise too_large("a call's arguments", limit_bytes)
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidInput("The body does not match its Content-Encoding: it is truncated or has extra data.")
    return decompressed
