"""Live sound over a WebSocket: segments of speech come back as text while the speaker goes on."""

from __future__ import annotations

import numpy as np
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from fastapi.responses import HTMLResponse
from numpy.typing import NDArray

from gpufn import Retry, asgi_app, enter, gpu_function, method
from recogniser import Recogniser
from vad import Segment, Segmenter

PAGE = """<!doctype html>
<title>transcription</title>
<button id="start">use the microphone</button> <span id="state"></span>
<ol id="text"></ol>
<script>
document.getElementById("start").onclick = async () => {
  const microphone = await navigator.mediaDevices.getUserMedia({audio: true});
  const socket = new WebSocket(new URL("listen", location.href).href.replace(/^http/, "ws"));
  const context = new AudioContext({sampleRate: 16000});
  const processor = context.createScriptProcessor(1024, 1, 1);
  context.createMediaStreamSource(microphone).connect(processor).connect(context.destination);
  processor.onaudioprocess = ({inputBuffer}) => {
    const samples = Int16Array.from(inputBuffer.getChannelData(0), sample => sample * 32767);
    if (socket.readyState === WebSocket.OPEN) socket.send(samples);
  };
  socket.onmessage = ({data}) => {
    const event = JSON.parse(data);
    document.getElementById("state").textContent = event.type === "speech" ? "…" : "";
    if (event.type === "text")
      document.getElementById("text").appendChild(document.createElement("li")).textContent = event.text;
  };
};
</script>
"""


@gpu_function(idle_timeout=30, retries=Retry(2))
class Transcriber:
    """The recogniser has workers of its own, on a GPU if it needs one: they serve the segments of all listeners."""

    @enter
    def load(self) -> None:
        self._recogniser = Recogniser()

    @method
    def transcribe(self, pcm: bytes) -> str:
        """Return the text of 16-bit samples, 16,000 per second."""
        text: str = self._recogniser.text(_samples(pcm))
        return text


@asgi_app(public=True, timeout=3600)
def live() -> FastAPI:
    app = FastAPI()

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return PAGE

    @app.websocket("/listen")
    async def listen(socket: WebSocket) -> None:
        """Receive 16-bit samples; an empty message ends the sound. Send {"type": "speech"} at the start of a segment,
        {"type": "text"} after its end."""
        await socket.accept()
        segmenter = Segmenter()
        try:
            while pcm := await socket.receive_bytes():
                was_speaking = segmenter.speaking
                for segment in segmenter.feed(_samples(pcm)):
                    await socket.send_json(await _transcribed(segment))
                if segmenter.speaking and not was_speaking:
                    await socket.send_json({"type": "speech"})
            if last := segmenter.finish():
                await socket.send_json(await _transcribed(last))
            await socket.close()
        except WebSocketDisconnect:
            print("the listener has gone")

    return app


async def _transcribed(segment: Segment) -> dict[str, str | float]:
    text = await Transcriber.transcribe.aio.remote(_pcm(segment))
    return {"type": "text", "start": round(segment.start, 2), "end": round(segment.end, 2), "text": text}


def _pcm(segment: Segment) -> bytes:
    pcm: bytes = (segment.samples * 32767).astype("<i2").tobytes()
    return pcm


def _samples(pcm: bytes) -> NDArray[np.float32]:
    return np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)
