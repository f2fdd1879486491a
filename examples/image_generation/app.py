"""Pictures from a prompt, with previews while they are made: as a stream, on a page, and for OpenAI's client."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Iterator

import msgspec
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, StreamingResponse
from PIL import Image

from diffusion import Diffusion, Estimate
from gpufn import asgi_app, enter, gpu_function, method

_SHOWN = 384  # pixels
PAGE = """<!doctype html>
<title>painter</title>
<form><input name="prompt" value="a red circle"> <button>paint</button> <progress value="0"></progress></form>
<p><img width="384" height="384" alt="">
<script>
let events;
document.querySelector("form").onsubmit = event => {
  event.preventDefault();
  events?.close();
  const query = new URLSearchParams({prompt: event.target.prompt.value, seed: Math.floor(Math.random() * 1e6)});
  events = new EventSource("paint?" + query);
  events.onmessage = ({data}) => {
    const {step, steps, png} = JSON.parse(data);
    document.querySelector("img").src = "data:image/png;base64," + png;
    document.querySelector("progress").value = step / steps;
    if (step === steps) events.close();
  };
  events.onerror = () => events.close();
};
</script>
"""


class Preview(msgspec.Struct):
    step: int
    steps: int
    png: bytes  # base64 in JSON


@gpu_function(idle_timeout=60)
class Painter:
    @enter
    def load(self) -> None:
        self._model = Diffusion()

    @method
    def paint(self, prompt: str, steps: int = 40, seed: int = 0, previews: int = 8) -> Iterator[Preview]:
        """Yield previews at equal distances; the last one is the picture."""
        if not 1 <= previews <= steps <= 200:
            raise ValueError(f"1 <= previews <= steps <= 200 is required, not {previews} previews and {steps} steps")
        shown = {round(number * steps / previews) for number in range(1, previews + 1)}
        for estimate in self._model.sample(prompt, steps, seed):
            if estimate.step in shown:
                yield Preview(estimate.step, steps, _png(estimate))


@gpu_function(name="toy-painter", serves="openai-images", idle_timeout=60)
def toy_painter(prompt: str, n: int = 1) -> list[bytes]:
    """The same for OpenAI's clients, which get no previews."""
    if not 1 <= n <= 8:
        raise ValueError(f"n is from 1 to 8, not {n}")
    return [list(Painter.paint.stream(prompt, previews=1, seed=seed))[-1].png for seed in range(n)]


@asgi_app(public=True)
def studio() -> FastAPI:
    """A page that shows the previews: the stream of the function becomes server-sent events."""
    app = FastAPI()

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return PAGE

    @app.get("/paint")
    async def paint(prompt: str, seed: int = 0) -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            async for preview in Painter.paint.aio.stream(prompt, seed=seed, previews=20):
                yield b"data: " + msgspec.json.encode(preview) + b"\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def _png(estimate: Estimate) -> bytes:
    with io.BytesIO() as file:
        Image.fromarray(estimate.pixels).resize((_SHOWN, _SHOWN), Image.Resampling.BICUBIC).save(file, "PNG")
        return file.getvalue()
