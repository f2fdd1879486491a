"""The service of the protocol: each method sends the request of the HTTP form, and translates the response.

The handlers read a message only after the client is authenticated, since gRPC holds each message in memory.
"""

from __future__ import annotations

import asyncio
import http
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from starlette.types import ASGIApp

from gpufn_core.domain.traffic import is_routing
from gpufn_core.errors import FunctionNotFound, GpufnError, InvalidInput, RateLimited, RevisionNotFound
from gpufn_core.spec.naming import names
from gpufn_gateway import problems
from gpufn_gateway.auth.access import Access
from gpufn_gateway.http.turns import Turns
from gpufn_gateway.oip.grpc import messages_pb2 as messages
from gpufn_gateway.oip.grpc import translation
from gpufn_gateway.oip.grpc.http_form import Address, HttpForm, HttpResponse
from gpufn_gateway.problems import Headers

M = TypeVar("M", bound=Message)
Metadata = tuple[tuple[str, str], ...]

_SERVICE: Final = "/inference.GRPCInferenceService/"
_SYSTEM_MEMORY: Final = "/v2/systemsharedmemory"
_CUDA_MEMORY: Final = "/v2/cudasharedmemory"
_READERS_OF_A_SENDER: Final = 4  # messages of one sender that are received at a time
_HEADER_LENGTH: Final = b"inference-header-content-length"
# Fields of a request that its metadata may set, and fields of the response that become trailing metadata.
_SENT: Final = ("authorization", "traceparent", "tracestate", "x-gpufn-priority", "x-gpufn-timeout")
_RETURNED: Final = (b"retry-after", b"x-gpufn-invocation", b"x-gpufn-revision", b"server-timing")
_STATUSES: Final[Mapping[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class Context(Protocol):
    """The part of `grpc.aio.ServicerContext` that the service uses."""

    def peer(self) -> str: ...
    def time_remaining(self) -> float | None: ...
    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None: ...
    def set_trailing_metadata(self, metadata: Metadata) -> None: ...
    async def abort(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> NoReturn: ...


class _Refused(Exception):
    """A response of the HTTP form that is an error."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__(response.status)
        self.code = _STATUSES.get(response.status, grpc.StatusCode.INTERNAL)
        self.message = response.error
        self.metadata = _metadata(response)


class Service(grpc.GenericRpcHandler):
    """`address_of` returns the client of a gRPC peer. At most `readers` messages are received at a time."""

    def __init__(
        self, app: ASGIApp, access: Access, address_of: Callable[[str], Address], *, readers: int, timeout_s: float
    ) -> None:
        self._http_form = HttpForm(app)
        self._access = access
        self._address_of = address_of
        self._readers = asyncio.Semaphore(readers)
        self._turns = Turns(_READERS_OF_A_SENDER)
        self._timeout_s = timeout_s
        self._stopping = asyncio.Event()
        unary: dict[str, Callable[[bytes, Context], Awaitable[Message]]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "ModelInfer": self._model_infer,
            "SystemSharedMemoryStatus": self._regions,
            "SystemSharedMemoryRegister": self._register_region,
            "SystemSharedMemoryUnregister": self._unregister_region,
            "CudaSharedMemoryStatus": self._cuda_regions,
            "CudaSharedMemoryRegister": self._register_cuda_region,
            "CudaSharedMemoryUnregister": self._unregister_cuda_region,
        }
        self._handlers = {
            _SERVICE + name: grpc.stream_unary_rpc_method_handler(self._unary(method)) for name, method in unary.items()
        }
        self._handlers[f"{_SERVICE}ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream_infer)

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self._handlers.get(call.method)

    def stop(self) -> None:
        """End the streams, each after its current request."""
        self._stopping.set()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _unary(
        self, method: Callable[[bytes, Context], Awaitable[Message]]
    ) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        async def handle(requests: AsyncIterator[bytes], context: Context) -> bytes:
            try:
                sender = await self._check(context)
                request = await self._read(requests, sender)
                if request is None:
                    raise InvalidInput("the request has no message")
                response = await method(request, context)
                return response.SerializeToString()
            except _Refused as refused:
                await context.abort(refused.code, refused.message, refused.metadata)
            except GpufnError as error:
                await _abort(context, error)
            raise AssertionError  # abort raises

        return handle

    async def _stream_infer(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        """Serve the requests of a stream in order. An error of a request does not end the stream."""
        try:
            sender = await self._check(context)
        except _Refused as refused:
            await context.abort(refused.code, refused.message, refused.metadata)
        try:
            with self._access.streams.open(sender):
                async for response in self._responses(requests, context):
                    yield response
        except RateLimited as error:
            await _abort(context, error)

    async def _responses(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        while (request := await self._next(requests)) is not None:
            try:
                response = messages.ModelStreamInferResponse(infer_response=await self._model_infer(request, context))
            except _Refused as refused:
                response = messages.ModelStreamInferResponse(error_message=refused.message)
            except GpufnError as error:
                response = messages.ModelStreamInferResponse(error_message=error.message)
            yield response.SerializeToString()

    async def _check(self, context: Context) -> str:
        """Refuse a client before its message is read. The application records the refusal. Return the sender. Raises
        _Refused."""
        try:
            return self._access.sender_of(self._access.authenticate(dict(_headers(context))))
        except GpufnError:
            await self._send(context, "GET", "/v2")
            raise AssertionError from None  # the application authenticates as well

    async def _next(self, requests: AsyncIterator[bytes]) -> bytes | None:
        """Return the next request of a stream, or None at its end or if the server stops."""
        stopping = asyncio.ensure_future(self._stopping.wait())
        reading = asyncio.ensure_future(_next_of(requests))
        try:
            await asyncio.wait((stopping, reading), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            stopping.cancel()
            reading.cancel()

    async def _read(self, requests: AsyncIterator[bytes], sender: str) -> bytes | None:
        """Receive the message of a request, or None if there is none. Raises InvalidInput if it takes too long."""
        try:
            async with asyncio.timeout(self._timeout_s), self._turns.of(sender), self._readers:
                return await _next_of(requests)
        except TimeoutError:
            raise InvalidInput(f"the request did not arrive within {self._timeout_s:g} s") from None

    async def _send(
        self,
        context: Context,
        method: str,
        path: str,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: Sequence[bytes] = (),
    ) -> HttpResponse:
        """Send a request of the HTTP form. Raises _Refused."""
        sent = [*_headers(context), *headers]
        client = self._address_of(context.peer())
        response = await self._http_form.send(method, path, sent, client=client, body=body)
        if response.status != http.HTTPStatus.OK:
            raise _Refused(response)
        context.set_trailing_metadata(_metadata(response))
        return response

    # --- methods -----------------------------------------------------------------------------------------------------

    async def _server_live(self, request: bytes, context: Context) -> Message:
        return messages.ServerLiveResponse(live=True)

    async def _server_ready(self, request: bytes, context: Context) -> Message:
        return messages.ServerReadyResponse(ready=await self._is_ready(context, "/v2/health/ready"))

    async def _model_ready(self, request: bytes, context: Context) -> Message:
        path = f"{_model_path(request)}/ready"
        return messages.ModelReadyResponse(ready=await self._is_ready(context, path))

    async def _is_ready(self, context: Context, path: str) -> bool:
        try:
            await self._send(context, "GET", path)
        except _Refused as refused:
            if refused.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    async def _server_metadata(self, request: bytes, context: Context) -> Message:
        return await self._get(context, "/v2", messages.ServerMetadataResponse())

    async def _model_metadata(self, request: bytes, context: Context) -> Message:
        return await self._get(context, _model_path(request), messages.ModelMetadataResponse())

    async def _model_config(self, request: bytes, context: Context) -> Message:
        return await self._get(context, f"{_model_path(request)}/config", messages.ModelConfigResponse(), "config")

    async def _model_statistics(self, request: bytes, context: Context) -> Message:
        path = f"{_model_path(request)}/stats" if request else "/v2/models/stats"
        return await self._get(context, path, messages.ModelStatisticsResponse())

    async def _repository_index(self, request: bytes, context: Context) -> Message:
        index = await self._send(context, "POST", "/v2/repository/index")
        response = messages.RepositoryIndexResponse()
        translation.from_json(index.body, response, field="models")
        return response

    async def _load(self, request: bytes, context: Context) -> Message:
        return await self._change_model(request, context, "load")

    async def _unload(self, request: bytes, context: Context) -> Message:
        return await self._change_model(request, context, "unload")

    async def _change_model(self, request: bytes, context: Context, verb: str) -> Message:
        message = _parse(messages.RepositoryModelRequest, request)
        path = f"/v2/repository/models/{_checked(message.model_name)}/{verb}"
        await self._send(context, "POST", path, body=[translation.model_change(message)])
        return messages.Empty()

    async def _get(self, context: Context, path: str, response: M, field: str = "") -> M:
        translation.from_json((await self._send(context, "GET", path)).body, response, field=field)
        return response

    async def _regions(self, request: bytes, context: Context) -> Message:
        found = await self._send(context, "GET", f"{_region_path(_SYSTEM_MEMORY, request)}/status")
        response = messages.SystemSharedMemoryStatusResponse()
        translation.from_json(translation.by_name(found.body), response, field="regions")
        return response

    async def _register_region(self, request: bytes, context: Context) -> Message:
        message = _parse(messages.SystemSharedMemoryRegisterRequest, request)
        path = f"{_region_path(_SYSTEM_MEMORY, request)}/register"
        await self._send(context, "POST", path, body=[translation.registration(message)])
        return messages.Empty()

    async def _unregister_region(self, request: bytes, context: Context) -> Message:
        await self._send(context, "POST", f"{_region_path(_SYSTEM_MEMORY, request)}/unregister")
        return messages.Empty()

    async def _cuda_regions(self, request: bytes, context: Context) -> Message:
        await self._send(context, "GET", f"{_region_path(_CUDA_MEMORY, request)}/status")
        return messages.Empty()

    async def _register_cuda_region(self, request: bytes, context: Context) -> Message:
        await self._send(context, "POST", f"{_region_path(_CUDA_MEMORY, request)}/register")
        return messages.Empty()

    async def _unregister_cuda_region(self, request: bytes, context: Context) -> Message:
        await self._send(context, "POST", f"{_region_path(_CUDA_MEMORY, request)}/unregister")
        return messages.Empty()

    async def _model_infer(self, request: bytes, context: Context) -> messages.ModelInferResponse:
        message = _parse(messages.ModelInferRequest, request)
        head_bytes, body = translation.inference_body(message)
        headers = [(_HEADER_LENGTH, b"%d" % head_bytes)]
        path = f"{_path_of(message.model_name, message.model_version)}/infer"
        response = await self._send(context, "POST", path, headers, body)
        return translation.inference_response(int(response.headers[_HEADER_LENGTH]), response.body)


async def _abort(context: Context, error: GpufnError) -> None:
    problem = problems.problem_of(error)
    await context.abort(_STATUSES.get(problem.status, grpc.StatusCode.INTERNAL), problem.info.message)


async def _next_of(requests: AsyncIterator[bytes]) -> bytes | None:
    return await anext(requests, None)


def _parse(kind: type[M], request: bytes) -> M:
    try:
        return kind.FromString(request)
    except DecodeError:
        raise InvalidInput("the request is not a message of the Open Inference Protocol") from None


def _model_path(request: bytes) -> str:
    message = _parse(messages.ModelRequest, request)
    return _path_of(message.name, message.version)


def _region_path(memory: str, request: bytes) -> str:
    """Return the path of a region, or of all without a name."""
    name = _parse(messages.RegionRequest, request).name
    if "/" in name:
        raise InvalidInput("the name of a region has no '/'", field="name")
    return f"{memory}/region/{name}" if name else memory


def _checked(model: str) -> str:
    """Return the name of a model for a path. Raises FunctionNotFound."""
    if not names.IN_PATH.fullmatch(model):
        raise FunctionNotFound(f"There is no model {names.shown(model)}.")
    return model


def _path_of(model: str, version: str) -> str:
    path = f"/v2/models/{_checked(model)}"
    if not version:
        return path
    if not version.isdecimal():
        raise RevisionNotFound(f"A version is the number of a revision, not {names.shown(version)}.")
    return f"{path}/versions/{version}"


def _headers(context: Context) -> Headers:
    """Return the header fields of a request. The deadline becomes the timeout of the call.

    No web page can send gRPC, so there is no Origin, and the Host is of no concern.
    """
    given = {
        name: value for name, value in context.invocation_metadata() or () if name in _SENT or is_routing(name.encode())
    }
    remaining_s = context.time_remaining()
    if remaining_s is not None and "x-gpufn-timeout" not in given:
        given["x-gpufn-timeout"] = f"{max(remaining_s, 0.001):.3f}"
    fields = [(name.encode(), value.encode() if isinstance(value, str) else value) for name, value in given.items()]
    return [(b"host", b"localhost"), *fields]


def _metadata(response: HttpResponse) -> Metadata:
    fields = response.headers
    return tuple((name.decode(), fields[name].decode("latin-1")) for name in _RETURNED if name in fields)
