"""The application of a web function: its start and end, and the sessions that it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.streams import web_session
from gpufn_core.protocol.streams.web_session import WebRequest
from gpufn_core.spec.web_spec import WebKind, root_path
from gpufn_runtime.worker.web.lifespan import Lifespan
from gpufn_runtime.worker.web.request import serve_request
from gpufn_runtime.worker.web.session import Session
from gpufn_runtime.worker.web.socket import serve_socket

_Event = MutableMapping[str, Any]
Asgi = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[_Event]], Callable[[_Event], Awaitable[None]]], Awaitable[None]
]


class Application:
    """`app` is the function's return value. A WSGI application runs in `threads` threads."""

    def __init__(self, app: Any, kind: WebKind, *, threads: int) -> None:
        if not callable(app):
            raise TypeError(f"the function returned {app!r}, which is no {kind.value.upper()} application")
        self._is_wsgi = kind is WebKind.WSGI
        self._app: Asgi = _wrap(app, threads) if self._is_wsgi else app
        self._lifespan = Lifespan(self._app)

    async def start(self) -> None:
        """Run the application's startup. Raises the errors of the function."""
        if not self._is_wsgi:
            await self._lifespan.start()

    async def stop(self) -> None:
        await self._lifespan.stop()

    async def serve(self, session: Session[WebRequest]) -> None:
        """Serve one request or WebSocket. Raises the errors of the application."""
        if not self._is_wsgi:
            serve = serve_socket if session.request.is_socket else serve_request
            await serve(self._app, session, self._lifespan.state)
            return
        if session.request.is_socket:
            await session.send(web_session.Close(web_session.NORMAL_CLOSE))  # WSGI has no WebSockets
            return
        # The thread would wait without an end for an event that could not be sent.
        running = asyncio.ensure_future(serve_request(self._app, session, {}, ends_when_gone=False))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            # A thread cannot be interrupted. Until it has ended the session keeps its slot; the runner kills the worker
            # if that takes too long.
            await asyncio.wait([running])
            raise


class WebRequests:
    """Reads the request of a session. A call of the function is refused: it would not be a request."""

    def __init__(self, function: str) -> None:
        self._function = function

    def bind(self, content_type: str, body: bytes | memoryview) -> tuple[list[Any], dict[str, Any]]:
        if content_type != web_session.CONTENT_TYPE:
            raise InvalidInput(
                f"{self._function} is a web application, which is not called: send requests to "
                f"{root_path(self._function)}/"
            )
        request, first = web_session.unpack_request(bytes(body))
        return [request, first], {}

    def by_name(self, content_type: str, body: bytes | memoryview) -> dict[str, Any]:
        request, first = self.bind(content_type, body)[0]
        return {"request": request, "body": first}


def _wrap(app: Any, threads: int) -> Any:
    try:
        from a2wsgi import WSGIMiddleware  # noqa: PLC0415  (most applications are ASGI)
    except ImportError as error:
        raise ImportError("a WSGI application needs a2wsgi in its image: add .pip_install('a2wsgi')") from error

    return WSGIMiddleware(app, workers=threads)
