"""The limit for any Starlette gateway: the process that has the socket answers."""

from __future__ import annotations

import os

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"x": (await request.json())["x"]})


app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])

if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ["PORT"]), log_level="error", access_log=False)
