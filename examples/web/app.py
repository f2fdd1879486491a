"""A FastAPI application with a page and a WebSocket, and a function behind a URL."""

import array
import math
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import HTMLResponse, StreamingResponse

from gpufn import asgi_app, web_endpoint

SILENCE_DB = -90.0
PAGE = """<!doctype html>
<title>level meter</title>
<button id="start">use the microphone</button> <meter id="level" min="-90" max="0" value="-90"></meter>
<script>
document.getElementById("start").onclick = async () => {
  const microphone = await navigator.mediaDevices.getUserMedia({audio: true});
  const socket = new WebSocket(new URL("levels", location.href).href.replace(/^http/, "ws"));
  const context = new AudioContext();
  const processor = context.createScriptProcessor(4096, 1, 1);
  context.createMediaStreamSource(microphone).connect(processor).connect(context.destination);
  processor.onaudioprocess = ({inputBuffer}) => {
    const samples = Int16Array.from(inputBuffer.getChannelData(0), sample => sample * 32767);
    if (socket.readyState === WebSocket.OPEN) socket.send(samples);
  };
  socket.onmessage = ({data}) => document.getElementById("level").value = JSON.parse(data).db;
};
</script>
"""


def loudness(samples: bytes) -> float:
    """Return the level of 16-bit samples in decibels below full scale."""
    values = array.array("h", samples)
    power = sum(value * value for value in values) / max(len(values), 1)
    return round(10 * math.log10(power / 32768**2), 1) if power else SILENCE_DB


@asgi_app(public=True, timeout=3600)
def meter() -> FastAPI:
    app = FastAPI()

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return PAGE

    @app.websocket("/levels")
    async def levels(socket: WebSocket) -> None:
        await socket.accept()
        async for samples in socket.iter_bytes():
            await socket.send_json({"db": loudness(samples)})

    @app.post("/levels")
    async def levels_of_a_body(request: Request) -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            async for samples in request.stream():
                if samples:
                    yield f"{loudness(samples[: len(samples) // 2 * 2])}\n"

        return StreamingResponse(lines(), media_type="text/plain")

    return app


@web_endpoint(methods=["GET", "POST"], public=True)
def decibels(ratio: float, *, power: bool = False) -> dict[str, float]:
    """Convert a ratio of amplitudes, or of powers, to decibels."""
    return {"db": (10 if power else 20) * math.log10(ratio)}
