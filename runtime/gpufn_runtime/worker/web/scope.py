"""The ASGI scope of a session. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpufn_core.protocol.streams.web_session import Headers, WebRequest


def scope_of(request: WebRequest, state: Mapping[str, Any]) -> dict[str, Any]:
    scope: dict[str, Any] = {
        "type": "websocket" if request.is_socket else "http",
        # 2.4: a `send` after the client has left raises OSError. With less, Starlette would read the body to find out.
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": request.http_version,
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.raw_path,
        "query_string": request.query,
        "root_path": request.root_path,
        "headers": list(request.headers),
        "client": request.client,
        "server": request.server,
        "state": dict(state),
    }
    if request.is_socket:
        scope["subprotocols"] = list(request.subprotocols)
        scope["extensions"] = {"websocket.http.response": {}}
    else:
        scope["method"] = request.method
    return scope


def headers_of(event: Mapping[str, Any]) -> Headers:
    """Return the headers of an event that an application sends."""
    return tuple((bytes(name), bytes(value)) for name, value in event.get("headers") or ())
