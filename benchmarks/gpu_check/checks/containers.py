"""A GPU in a worker's container: a whole GPU, and a part of one by MPS.

The function needs libcuda only, which NVIDIA's hook or CDI brings into the container, and gpufn's package, which the
agent mounts. The image is Docker's `python:X-slim`, or the one that GPU_CHECK_BASE_IMAGE names. It is built with pip,
so a machine without a network needs a base image that has msgspec and cloudpickle.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import CannotRun, Machine
from gpu_check.platform import CallFailed, Platform, up

_VRAM_GIB: Final = 4
_FIELDS: Final = ("multiprocessors", "free_bytes", "total_bytes", "is_client", "allocates", "in_container")
_SOURCE: Final = """\
from gpufn import Image, gpu_function

image = Image.python({python!r})


def look() -> dict[str, int | bool | str | None]:
    import os

    from gpufn_runtime.worker.gpu.cuda_driver import Driver

    driver = Driver()
    driver.open()
    return {{
        "multiprocessors": driver.multiprocessors(),
        "free_bytes": driver.free_bytes(),
        "total_bytes": driver.total_bytes(),
        "is_client": driver.is_client(),
        "allocates": driver.can_allocate(1 << 30),
        "in_container": os.path.isdir("/gpufn/worker"),
    }}


@gpu_function(name="gpu-check-whole", gpu="any", image=image, max_workers=1, idle_timeout=1, park_timeout=0)
def whole() -> dict[str, int | bool | str | None]:
    return look()


@gpu_function(name="gpu-check-part", gpu="any", share="mps", vram="{vram}Gi", sm=25, image=image, max_workers=1)
def part() -> dict[str, int | bool | str | None]:
    return look()
"""


def gpu_container(machine: Machine) -> Finding:
    machine.real_gpu()
    machine.need_program("docker")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    base = os.environ.get("GPU_CHECK_BASE_IMAGE")
    rows: list[tuple[Any, ...]] = []
    wrong: list[str] = []
    with up(machine, **({"GPUFN_BASE_IMAGE": base} if base else {})) as platform:
        node = platform.get("/v1/nodes")["nodes"][0]
        if trouble := node.get("container_trouble") or node.get("gpu_container_trouble"):
            raise CannotRun(trouble)
        platform.deploy(_SOURCE.format(python=python, vram=_VRAM_GIB))
        names = ["gpu-check-whole"]
        if "nvidia-cuda-mps-control" in machine.programs and os.geteuid() == 0:
            names.append("gpu-check-part")
        for name in names:
            answer = _answer(platform, name)
            rows.append((name, *answer.values()))
            print(*rows[-1], sep="; ")  # intermediate results, in case the step times out
            wrong += _problems(name, answer)
            platform.gpufn("rm", name, "--yes")  # a GPU is not shared until it is empty
    return Finding(
        summary="; ".join(f"{row[0]}: {row[1]} multiprocessors, {row[2] >> 20} MiB free" for row in rows),
        tables=[Table(("function", *_FIELDS), rows)],
        wrong=wrong,
    )


def _answer(platform: Platform, name: str) -> dict[str, int]:
    try:
        answer = platform.invoke(name)
    except CallFailed as error:
        if "build_failed" in str(error):
            raise CannotRun(f"its image cannot be built here: {error}") from error
        raise
    return {field: answer[field] for field in _FIELDS}


def _problems(name: str, answer: dict[str, int]) -> list[str]:
    problems = []
    if not answer["in_container"]:
        problems.append(f"{name}: the worker is not in a container")
    if not answer["allocates"]:
        problems.append(f"{name}: 1 GiB cannot be allocated")
    if name.endswith("part") and (not answer["is_client"] or answer["free_bytes"] > _VRAM_GIB << 30):
        problems.append(f"{name}: the worker is no client of MPS with {_VRAM_GIB} GiB: {answer}")
    return problems
