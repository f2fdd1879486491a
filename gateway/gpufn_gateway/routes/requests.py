"""What the management routes read from a request, and how they answer."""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gpufn_core.encoding import media
from gpufn_core.encoding.msgspec_errors import json_fault, misfit
from gpufn_core.errors import InvalidInput
from gpufn_core.ids import is_digest
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bounds import LONGEST_WAIT_S
from gpufn_gateway.problems import RouteError

T = TypeVar("T", bound=msgspec.Struct)


def json_answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media.JSON)


def principal_of(request: Request) -> Principal:
    """Set by the edge, which authenticates every request before it is routed."""
    principal: Principal = request.scope["gpufn.principal"]
    return principal


def headers_of(request: Request) -> dict[bytes, bytes]:
    return dict(request.scope["headers"])


def call_id_in(request: Request) -> str:
    """The path's `{id}`, of a call or a map, as it is kept: a client that chose it may write a ULID in capitals."""
    return str(request.path_params["id"]).lower()


def digest_in(request: Request, what: str) -> str:
    """The path's `{digest}`, of `what`. Raises InvalidInput."""
    return checked_digest(request.path_params["digest"], what)


def checked_digest(text: str, what: str) -> str:
    if not is_digest(text):
        raise InvalidInput(f"a digest is the sha256 of {what}: 64 hexadecimal digits", field="digest")
    return text


def no_such_key() -> RouteError:
    return RouteError(404, "There is no key with this id.")


async def read_json(request: Request, kind: type[T], bodies: BodyReader) -> T:
    """The body as `kind`; no body is an empty object. Raises InvalidInput with the field."""
    body = await bodies.read(headers_of(request), request.receive)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not valid JSON: {json_fault(error, body)}") from None


def _refusal(text: str, kind: type[msgspec.Struct]) -> InvalidInput:
    """msgspec's words, as an invoke tells them."""
    found = misfit(text)
    path = found.path
    if found.is_missing:
        return InvalidInput(f"{path}: missing", field=path)
    if found.is_unknown:
        names = ", ".join(field.encode_name for field in msgspec.structs.fields(kind))
        return InvalidInput(f"{path}: there is no such field{'' if found.at else f'; it takes {names}'}", field=path)
    return InvalidInput(f"{path or 'the body is a JSON object'}: {found.text}", field=path or None)


def whole_number(text: str, most_digits: int) -> int | None:
    """Of a path or a header: digits from 0 to 9, not those of other scripts, which `int` would read as well. None when
    it is none, or has more digits than that."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= most_digits else None


def number(request: Request, name: str, default: float, low: float, high: float) -> float:
    """A number from the query, within bounds. Raises InvalidInput."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text) if text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        bounds = f"from {low:g} on" if high == math.inf else f"from {low:g} to {high:g}"
        raise InvalidInput(f"{name} is a number {bounds}, not {text[:40]!r}", field=name)
    return value


def seconds_to_wait(request: Request) -> float:
    """`?wait=30`, of a request for what is not there yet. Raises InvalidInput."""
    return number(request, "wait", 0.0, 0.0, LONGEST_WAIT_S)


def flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidInput(f"{name} is true or false, not {text[:40]!r}", field=name)
    return text in ("true", "1")
