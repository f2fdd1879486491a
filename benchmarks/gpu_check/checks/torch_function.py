"""A function that uses torch, from cold start to warm calls, with a template process and without."""

from __future__ import annotations

import statistics
from typing import Any, Final

from gpu_check.findings import Finding, Table
from gpu_check.machine import Machine
from gpu_check.platform import Platform, up

_COLD_STARTS: Final = 3
_WARM_CALLS: Final = 200
_NAME: Final = "gpu-check-torch"
_SOURCE: Final = """\
import torch

from gpufn import gpu_function


@gpu_function(
    name={name!r}, gpu={gpu!r}, max_workers=1, idle_timeout=0.5, scaledown_window=0.5, park_timeout=0
)
def multiply(size: int = 512) -> dict[str, float | str]:
    device = {device!r}
    a = torch.ones(size, size, device=device)
    return {{"mean": float((a @ a).mean()), "device": str(a.device)}}
"""


def torch_function(machine: Machine) -> Finding:
    """Measure on the GPU, or on the CPU without one."""
    machine.need_module("torch")
    measured = {
        "with a template": _measure(machine),
        "without": _measure(machine, GPUFN_TEMPLATES="0"),
    }
    rows = [
        (setup, *(f"{figures[key]:.1f}" for key in ("cold_ms", "second_ms", "warm_p50_ms", "warm_p99_ms")))
        for setup, figures in measured.items()
    ]
    cold, bare = (figures["cold_ms"] for figures in measured.values())
    warm = measured["with a template"]["warm_p50_ms"]
    return Finding(
        summary=f"on {machine.torch_device}: cold start {cold:.0f} ms with a template process, {bare:.0f} ms without; "
        f"a warm call {warm:.1f} ms",
        figures={"device": machine.torch_device, **measured},
        tables=[Table(("", "cold start, ms", "call after it, ms", "warm p50, ms", "warm p99, ms"), rows)],
    )


def _measure(machine: Machine, **environ: str) -> dict[str, Any]:
    with up(machine, **environ) as platform:
        platform.deploy(
            _SOURCE.format(
                name=_NAME,
                gpu="any" if machine.gpus else None,
                device=machine.torch_device,
            )
        )
        first_ever_s, _ = _call(platform, machine)  # fills caches, including the driver's kernel cache
        cold, second = [], []
        for _ in range(_COLD_STARTS):
            platform.wait_for_zero(_NAME)
            cold.append(_call(platform, machine)[0])
            second.append(_call(platform, machine)[0])
        warm = sorted(_call(platform, machine)[0] for _ in range(_WARM_CALLS))
    print("s:", first_ever_s, cold, second, warm[-1])  # intermediate results, in case the step times out
    return {
        "first_ever_ms": first_ever_s * 1e3,
        "cold_ms": statistics.median(cold) * 1e3,
        "second_ms": statistics.median(second) * 1e3,
        "warm_p50_ms": statistics.median(warm) * 1e3,
        "warm_p99_ms": warm[int(len(warm) * 0.99)] * 1e3,
    }


def _call(platform: Platform, machine: Machine) -> tuple[float, Any]:
    seconds, result = platform.timed(_NAME)
    assert result["mean"] == 512.0, result
    assert result["device"].startswith(machine.torch_device), result
    return seconds, result
