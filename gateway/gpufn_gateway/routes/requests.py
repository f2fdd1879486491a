"""Helpers of the management routes: check scopes, read values from a request, build a response."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final, TypeVar

import msgspec
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding import media
from gpufn_core.encoding.msgspec_errors import parse_validation_error
from gpufn_core.errors import InvalidInput
from gpufn_core.ids import is_digest
from gpufn_core.spec.naming import names
from gpufn_gateway.arguments.json_body import decode_json
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.http.sse import pump
from gpufn_gateway.openapi.request_bounds import MAX_WAIT_S
from gpufn_gateway.problems import Headers, RouteError

T = TypeVar("T", bound=msgspec.Struct)

TURNS: Final = "gpufn.turns"  # in the scope: turns of the sender at requests that read many records
CHECK_KEY: Final = "gpufn.check"  # in the scope: raises Unauthorized if the client's rights are no longer the same


class _NameConvertor(Convertor[str]):
    """Path parameter with the name of a function, `predict` or `prod/search/predict`, or an id that starts with one."""

    regex = names.IN_PATH.pattern

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("name", _NameConvertor())


def state_in(request: Request) -> InvocationState | None:
    """Return the `state` of the query. Raises InvalidInput."""
    text = request.query_params.get("state")
    if text is not None and text not in tuple(InvocationState):
        raise InvalidInput(f"state must be one of {', '.join(InvocationState)}; not {text[:40]!r}", field="state")
    return None if text is None else InvocationState(text)


def route(
    method: str,
    path: str,
    handler: Callable[[Request], Awaitable[ASGIApp]],
    scope: str = "",
    *,
    of_functions: bool = False,
    scans: bool = False,
) -> Route:
    """Return a route. Raises Forbidden for clients without `scope`.

    `scans`: the handler reads many records, so the requests of a sender take turns.

    `of_functions`: a scope with a pattern is enough, and the handler checks it for the functions of the request. A
    route without it does not accept such a scope.
    """

    async def check_scope(request: Request) -> ASGIApp:
        principal = principal_of(request)
        (principal.require_somewhere if of_functions else principal.require)(scope)
        return await in_turn(request)

    async def in_turn(request: Request) -> ASGIApp:
        if not scans:
            return await handler(request)
        async with turns_of(request):
            await asyncio.sleep(0)  # a handler that never waits would take each of its turns at once
            return await handler(request)

    return Route(path, check_scope if scope else in_turn, methods=[method])


class StreamedResponse:
    """Response that sends `chunks` as they arrive, while the client keeps its rights. See `pump`."""

    def __init__(self, headers: Headers, chunks: AsyncIterator[bytes], heartbeat: bytes = b"") -> None:
        self._headers = headers
        self._chunks = chunks
        self._heartbeat = heartbeat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["method"] == "HEAD"
        chunks = _while_allowed(self._chunks, scope[CHECK_KEY])
        await pump(receive, send, self._headers, chunks, heartbeat=self._heartbeat, is_head=is_head)


async def _while_allowed(chunks: AsyncIterator[bytes], check: Callable[[], None]) -> AsyncIterator[bytes]:
    """Yield `chunks`. Raises the errors of `check`: a stream may last for days, and its key may be deleted
    meanwhile."""
    async with contextlib.aclosing(chunks) as source:  # type: ignore[type-var]
        async for chunk in source:
            check()
            yield chunk


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media.JSON)


def principal_of(request: Request) -> Principal:
    """Return the principal, which the application sets before it routes a request."""
    principal: Principal = request.scope["gpufn.principal"]
    return principal


def turns_of(request: Request) -> asyncio.Semaphore:
    """Return the turns of the sender at requests that read many records. A turn is a context."""
    turns: asyncio.Semaphore = request.scope[TURNS]
    return turns


def headers_of(request: Request) -> dict[bytes, bytes]:
    return dict(request.scope["headers"])


def call_id_in(request: Request) -> str:
    """Return the path's `{id}` of a call or map in lower case: a client may send its own ULID in upper case."""
    return str(request.path_params["id"]).lower()


def digest_in(request: Request, what: str) -> str:
    """Return the path's `{digest}` of `what`. Raises InvalidInput."""
    return checked_digest(request.path_params["digest"], what)


def checked_digest(text: str, what: str) -> str:
    if not is_digest(text):
        raise InvalidInput(f"a digest must be the sha256 of {what}: 64 hexadecimal digits", field="digest")
    return text


def no_such_key(id_: str) -> RouteError:
    return RouteError(404, f"There is no API key {id_[:80]!r}: see `gpufn keys`.")


async def read_json(request: Request, kind: type[T], bodies: BodyReader) -> T:
    """Decode the body as `kind`; no body counts as an empty object. Raises InvalidInput with the field."""
    body = await bodies.read(headers_of(request), request.receive)
    try:
        return decode_json(body or b"{}", kind)
    except msgspec.ValidationError as error:
        raise _invalid_input(str(error), kind) from None


def _invalid_input(text: str, kind: type[msgspec.Struct]) -> InvalidInput:
    """Convert msgspec's message to the form that invoke uses."""
    error = parse_validation_error(text)
    path = error.path
    if error.is_missing:
        return InvalidInput(f"{path}: missing", field=path)
    if error.is_unknown:
        names = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        return InvalidInput(f"{path}: there is no such field{'' if error.at else f'; it takes {names}'}", field=path)
    return InvalidInput(f"{path or 'the body is a JSON object'}: {error.text}", field=path or None)


def whole_number(text: str, max_digits: int) -> int | None:
    """Parse an integer of at most `max_digits` digits, else None.

    Only the digits 0 to 9 count: `int` would also accept the digits of other scripts.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= max_digits else None


def number(request: Request, name: str, default: float, low: float, high: float) -> float:
    """Return a number from the query, within bounds. Raises InvalidInput."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text) if text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        bounds = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise InvalidInput(f"{name} must be a number {bounds}, not {text[:40]!r}", field=name)
    return value


def wait_seconds(request: Request) -> float:
    """Return the seconds of a long poll (`?wait=30`). Raises InvalidInput."""
    return number(request, "wait", 0.0, 0.0, MAX_WAIT_S)


def flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidInput(f"{name} must be true or false, not {text[:40]!r}", field=name)
    return text in ("true", "1")
