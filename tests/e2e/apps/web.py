"""Web functions for tests/e2e/test_web.py."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gpufn import asgi_app, web_endpoint, wsgi_app


@asgi_app(max_workers=1)
def site() -> Any:
    from fastapi import FastAPI, Request, UploadFile, WebSocket
    from fastapi.responses import FileResponse, StreamingResponse

    with tempfile.NamedTemporaryFile(suffix=".bin", delete=False) as file:
        file.write(bytes(range(256)) * 1000)
    seen: list[str] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, str]]:
        yield {"started": "yes"}

    app = FastAPI(lifespan=lifespan)

    @app.get("/")
    def home(request: Request) -> dict[str, Any]:
        return {
            "started": request.state.started,
            "link": request.url_for("seen_events").path,
            "key": request.headers.get("authorization"),
            "query": request.query_params.get("q"),
        }

    @app.get("/seen")
    def seen_events() -> list[str]:
        return seen

    @app.post("/upload")
    async def upload(file: UploadFile) -> dict[str, Any]:
        return {"name": file.filename, "size": len(await file.read())}

    @app.patch("/shout")
    async def shout(request: Request) -> StreamingResponse:
        async def louder() -> AsyncIterator[bytes]:
            async for part in request.stream():
                yield part.upper()

        return StreamingResponse(louder(), media_type="text/plain")

    @app.api_route("/file", methods=["GET", "HEAD"])
    def some_bytes() -> FileResponse:
        return FileResponse(file.name, headers={"cache-control": "max-age=60"})

    @app.websocket("/echo")
    async def echo(socket: WebSocket) -> None:
        await socket.accept(subprotocol=(socket.scope["subprotocols"] or [None])[0])
        while (message := await socket.receive())["type"] == "websocket.receive":
            await socket.send({**message, "type": "websocket.send"})
        seen.append(f"closed {message['code']}")

    @app.websocket("/sleeps")
    async def sleeps(socket: WebSocket) -> None:
        await socket.accept()
        await asyncio.sleep(60)

    @app.websocket("/raises")
    async def raises(socket: WebSocket) -> None:
        await socket.accept()
        raise ValueError("a secret reason")

    @app.get("/waits")
    async def waits(request: Request) -> StreamingResponse:
        async def nothing() -> AsyncIterator[bytes]:
            seen.append("waits")
            yield b"a"
            while not await request.is_disconnected():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            seen.append("disconnected")

        return StreamingResponse(nothing())

    return app


@asgi_app(max_workers=1, timeout=1, public=True)
def broken() -> Any:
    """An application that breaks the rules of ASGI, in the way that the path names."""
    start = {"type": "http.response.start", "status": 200, "headers": []}
    part = {"type": "http.response.body", "body": b"part", "more_body": True}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            raise RuntimeError("no lifespan")
        events: dict[str, list[Any]] = {
            "twice": [start, start],
            "nothing": [],
            "body": [part],
            "split": [{**start, "headers": [(b"a", b"b\r\nset-cookie: x=y")]}, {**part, "more_body": False}],
            "short": [{**start, "headers": [(b"content-length", b"9")]}, {**part, "more_body": False}],
            "half": [start, part],
            "ok": [start, {**part, "more_body": False}],
            "never": [],
            "sleeps": [start],
            "dies": [start, part],
        }
        case = scope["path"].removeprefix(scope["root_path"]).strip("/")
        sent = events[case] if scope["type"] == "http" else [{"type": "websocket.accept"}] * len(events[case][:1])
        for event in sent:
            await send(event)
        if case in ("never", "sleeps"):
            await asyncio.sleep(60)
        if case == "dies":
            gate = Path(scope["query_string"].decode().removeprefix("gate="))
            while not gate.exists():  # noqa: ASYNC110, ASYNC240  until the client has the part
                await asyncio.sleep(0.01)
            os._exit(7)

    return app


@wsgi_app(max_workers=1)
def old() -> Any:
    from flask import Flask, request

    app = Flask(__name__)

    @app.post("/size")
    def size() -> dict[str, Any]:
        return {"size": len(request.get_data()), "root": request.script_root, "q": request.args["q"]}

    return app


@web_endpoint(methods=["GET", "POST"], public=True, max_workers=1)
def area(width: float, height: float = 1.0) -> float:
    return width * height
