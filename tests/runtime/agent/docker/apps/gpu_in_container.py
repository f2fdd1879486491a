"""In an image: a fake libcuda.so.1, which is an MPS client if it finds what a real client needs of its daemon."""

import ctypes
import os
from typing import Any

from fake_cuda import FakeCuda  # type: ignore[import-not-found]  # beside this file in the image

_load = ctypes.CDLL


def _library(name: Any, *arguments: Any, **options: Any) -> Any:
    if name != "libcuda.so.1":
        return _load(name, *arguments, **options)
    pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")
    reaches = os.path.exists(f"{pipe}/control") and os.path.exists("/dev/shm/of-the-daemon")
    with open(f"/dev/shm/of-{os.environ['WHO']}", "w"):  # like libcuda's shared memory, which the server opens
        return FakeCuda(os.environ, reaches=reaches, multiprocessors=58, memory_bytes=24 << 30)


ctypes.CDLL = _library  # type: ignore[assignment,misc]
