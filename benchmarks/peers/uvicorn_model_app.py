"""The limit for any Python gateway: the process that has the socket runs the model. The bytes of a row in and out."""

from __future__ import annotations

import os

import uvicorn
from onnx_rows import Rows
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

rows = Rows()


async def infer(request: Request) -> Response:
    output = rows.run(rows.read(await request.body())[None])
    return Response(output.data.cast("B"), media_type="application/octet-stream")


app = Starlette(routes=[Route("/infer", infer, methods=["POST"])])

if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ["PORT"]), log_level="error", access_log=False)
