"""Functions whose workers share a GPU by MPS, each in a container."""

import os
from typing import Any

from gpufn import Image, gpu_function

_PACKAGES = "/usr/local/lib/python3.11/dist-packages"
IMAGE = (
    Image.python("3.11")
    .add_file("gpu_in_container.pth", f"{_PACKAGES}/gpu_in_container.pth")
    .add_file("gpu_in_container.py", f"{_PACKAGES}/gpu_in_container.py")
    .add_file("../../../worker/fake_cuda.py", f"{_PACKAGES}/fake_cuda.py")
)


def _environment() -> dict[str, Any]:
    return {
        "environ": {name: value for name, value in os.environ.items() if name.startswith(("CUDA", "NVIDIA"))},
        "uid": os.getuid(),
        "memory": sorted(name for name in os.listdir("/dev/shm") if name.startswith("of-")),
        "pipes": os.listdir("/gpufn/mps"),
        "pipes_are_ours": os.access("/gpufn/mps", os.W_OK),
    }


@gpu_function(image=IMAGE, gpu="any", share="mps", vram="10Gi", sm=25, max_workers=1, env={"WHO": "part"})
def part() -> dict[str, Any]:
    return _environment()


@gpu_function(image=IMAGE, gpu="any", share="mps", vram="10Gi", max_workers=1, env={"WHO": "neighbour"})
def neighbour() -> dict[str, Any]:
    return _environment()
