"""A Gradio application whose work is done by another function, with workers of its own."""

from __future__ import annotations

from typing import Any

from gpufn import Image, asgi_app, gpu_function

NUMPY = Image().pip_install("numpy>=2")
GRADIO = NUMPY.pip_install("gradio>=6.31,<7")
_DEPTH = 60


@gpu_function(image=NUMPY, idle_timeout=30)
def julia(real: float, imaginary: float, size: int) -> Any:
    """Return the Julia set of a complex number, as a gray picture: uint8 of shape (size, size)."""
    import numpy as np  # noqa: PLC0415  only the environment of the function needs it

    y, x = np.mgrid[1.3 : -1.3 : size * 1j, -1.6 : 1.6 : size * 1j]
    z, steps = x + 1j * y, np.zeros(x.shape)
    for _ in range(_DEPTH):
        inside = np.abs(z) < 4
        z[inside] = z[inside] ** 2 + complex(real, imaginary)
        steps += inside
    return (255 * (steps / _DEPTH) ** 0.5).astype(np.uint8)


@asgi_app(image=GRADIO, memory="1Gi", public=True, max_workers=1, timeout=3600)
def explorer() -> Any:
    import gradio as gr  # noqa: PLC0415
    from fastapi import FastAPI  # noqa: PLC0415

    async def draw(real: float, imaginary: float) -> Any:
        return await julia.aio.remote(real, imaginary, 400)

    with gr.Blocks(title="Julia sets", analytics_enabled=False) as page:
        gr.Markdown("# Julia sets")
        with gr.Row():
            real = gr.Slider(-1.5, 1.5, -0.8, step=0.01, label="real part")
            imaginary = gr.Slider(-1.5, 1.5, 0.156, step=0.01, label="imaginary part")
        picture = gr.Image(label="drawn by the function julia", format="png")
        for event in (page.load, real.release, imaginary.release):
            event(draw, [real, imaginary], picture, api_name="draw")
    return gr.mount_gradio_app(FastAPI(), page, path="")
