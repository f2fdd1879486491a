"""Results without an envelope. Pure."""

from __future__ import annotations

import msgspec

from gpufn_core.encoding import media


def raw(body: bytes, content_type: str) -> tuple[bytes, str]:
    """Return a result as OpenFaaS sends it, and its content type: a text without quotes, anything else as it is.

    >>> raw(b'"hello"', "application/json"), raw(b'{"a": 1}', "application/json")
    ((b'hello', 'text/plain; charset=utf-8'), (b'{"a": 1}', 'application/json'))
    """
    if content_type == media.JSON and body.startswith(b'"'):
        return msgspec.json.decode(body, type=str).encode(), "text/plain; charset=utf-8"
    return body, content_type
