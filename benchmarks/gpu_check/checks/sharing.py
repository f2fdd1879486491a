"""One to eight functions on one GPU: with MPS, in time slices, and exclusively, which means one after the other.

Each call multiplies the same number of matrices, so calls per second are comparable over the modes. Sharing callers
call at the same time. Exclusive ones take turns, so that their calls per second include the handover of the GPU from
one worker to the next. All workers have started before the measurement.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Final

from gpu_check.findings import Finding, Plot, Table
from gpu_check.load import Caller, CallStats, all_at_once
from gpu_check.machine import Machine
from gpu_check.mps import need_mps
from gpu_check.platform import Platform, up

_COUNTS: Final = (1, 2, 4, 8)
_SECONDS: Final = 4.0  # of load, for each count
_PRODUCTS: Final = 500  # of each call: about 10 ms on an H100, which is not full with one function
_PRETENDED_PRODUCTS: Final = 1
_SHARE_OF_MEMORY: Final = 0.1  # of the GPU, for each of eight functions, under MPS
_WORK: Final = """\
import functools
import time

import torch

from gpufn import gpu_function


@functools.cache
def matrix():
    return torch.randn(1024, 1024, device={device!r}, dtype={dtype})


def multiply(times: int) -> float:
    # Return milliseconds.
    a = matrix()
    started = time.perf_counter()
    for _ in range(times):
        a @ a
    if a.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3
"""
_FUNCTION: Final = """

@gpu_function(name={name!r}, gpu="any", {share}, max_workers=1, idle_timeout=120)
def tenant_{number}(times: int) -> float:
    return multiply(times)
"""


Measure = Callable[[Platform, int, int], CallStats]


class _Refused(Exception):
    """A function could not be called beside the others."""


def by_time(machine: Machine) -> Finding:
    return _shared(machine, "time", "share='time'")


def exclusively(machine: Machine) -> Finding:
    return _shared(machine, "exclusive", "share='exclusive'")


def by_mps(machine: Machine) -> Finding:
    vram = int(need_mps(machine).memory_bytes * _SHARE_OF_MEMORY)
    return _shared(machine, "MPS", f"share='mps', vram={vram}")


def _shared(machine: Machine, mode: str, share: str) -> Finding:
    machine.gpu()
    machine.need_module("torch")
    measure = _in_turns if mode == "exclusive" else _together
    with up(machine) as platform:
        platform.deploy(_source(machine, share))
        times = _PRETENDED_PRODUCTS if machine.pretended or not machine.gpus else _PRODUCTS
        stats, refused = _up_to_most(measure, platform, times)
    if not stats or not stats[1].calls_s:
        raise RuntimeError(refused or f"no call succeeded: {stats[1].failures[:3]}")
    per_second = [each.per_second for each in stats.values()]
    p99 = [each.quantile_ms(0.99) for each in stats.values()]
    rows = [
        (count, f"{each.per_second:.1f}", *(_ms(each, share) for share in (0.5, 0.99, 1.0)), len(each.failures))
        for count, each in stats.items()
    ]
    failed = [f"{count} functions: {each.failures[0]}" for count, each in stats.items() if each.failures]
    labels = [str(count) for count in stats]
    return Finding(
        summary=f"{mode}: {per_second[0]:.0f} calls/s alone, {per_second[-1]:.0f} with {labels[-1]} functions "
        f"(p99 {p99[0] or 0:.0f} → {p99[-1] or 0:.0f} ms)",
        figures={
            "times": times,
            "per_second": dict(zip(labels, per_second, strict=True)),
            "p99_ms": dict(zip(labels, p99, strict=True)),
        },
        tables=[Table(("functions", "calls/s", "p50, ms", "p99, ms", "max, ms", "failed"), rows, mode)],
        plots=[
            Plot("Calls per second by functions on one GPU", "calls/s", labels, {mode: per_second}),
            Plot("p99 by functions on one GPU", "ms", labels, {mode: p99}),
        ],
        wrong=[*failed, refused] if refused else failed,
    )


def _up_to_most(measure: Measure, platform: Platform, times: int) -> tuple[dict[int, CallStats], str]:
    """Return statistics by the number of functions, and why larger numbers failed if a call was impossible."""
    stats: dict[int, CallStats] = {}
    for count in _COUNTS:
        try:
            stats[count] = measure(platform, count, times)
        except _Refused as refused:
            return stats, f"{count} functions: {refused}"
        # Intermediate results, in case the step times out.
        print(count, stats[count].per_second, stats[count].quantile_ms(0.99), stats[count].failures[:3], sep="; ")
    return stats, ""


def _source(machine: Machine, share: str) -> str:
    dtype = "torch.float32" if machine.torch_device == "cpu" else "torch.float16"
    tenant = functools.partial(_FUNCTION.format, share=share)
    tenants = [tenant(name=_name(number), number=number) for number in range(_COUNTS[-1])]
    return _WORK.format(device=machine.torch_device, dtype=dtype) + "".join(tenants)


def _name(number: int) -> str:
    return f"gpu-check-tenant-{number}"


def _together(platform: Platform, count: int, times: int) -> CallStats:
    callers = _started(platform, count, times)
    started = time.perf_counter()
    stats = all_at_once(callers, _SECONDS)
    return CallStats.together(stats, time.perf_counter() - started)


def _in_turns(platform: Platform, count: int, times: int) -> CallStats:
    """Let callers take turns. A caller's first call waits until the GPU has changed hands."""
    callers = _started(platform, count, times)
    started = time.perf_counter()
    stats = []
    for caller in callers:
        stats += [caller.once(), caller.for_seconds(_SECONDS / count)]
    return CallStats.together(stats, time.perf_counter() - started)


def _started(platform: Platform, count: int, times: int) -> list[Caller]:
    """Return callers whose functions have workers that have loaded their kernels. Raises _Refused."""
    callers = [Caller(platform.url, _name(number), {"times": times}) for number in range(count)]
    for number, caller in enumerate(callers):
        if why := caller.call():
            raise _Refused(f"{_name(number)} could not be called: {why}; {platform.why(_name(number))}")
    return callers


def _ms(stats: CallStats, share: float) -> Any:
    value = stats.quantile_ms(share)
    return "" if value is None else f"{value:.1f}"
