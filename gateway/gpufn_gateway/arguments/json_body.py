"""Decoding of a JSON body, for the routes and for other protocols. Pure."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from gpufn_core.encoding.msgspec_errors import describe_json_error
from gpufn_core.errors import InvalidInput

T = TypeVar("T")


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode a body. Raises InvalidInput if it is not JSON, and msgspec.ValidationError if it is not a `kind`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not valid JSON: {describe_json_error(error, body)}") from None
