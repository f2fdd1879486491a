"""A faulty worker beside a healthy one: what the neighbor notices, and how soon both work again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from gpu_check.findings import Finding, Table
from gpu_check.load import Caller, CallStats
from gpu_check.machine import Machine
from gpu_check.mps import need_mps
from gpu_check.platform import CallFailed, Platform, up

# A device-side assertion corrupts the CUDA context for good: the process has to be replaced.
_KINDS: Final = ("assertion on the device", "out of memory", "segmentation fault")
_RECOVERY_S: Final = 20.0
_QUIET_S: Final = 1.0  # of the neighbor's calls before the first fault and after each
_SHARE_OF_MEMORY: Final = 0.2
_FAULTY, _STEADY = "gpu-check-faulty", "gpu-check-steady"
_SOURCE: Final = """\
import ctypes

import torch

from gpufn import gpu_function

DEVICE = {device!r}


@gpu_function(name={faulty!r}, gpu="any", {share}, max_workers=1, idle_timeout=60)
def break_by(kind: str) -> float:
    a = torch.ones(64, 64, device=DEVICE)
    if kind == {kinds[0]!r}:
        a[torch.tensor([1 << 40], device=DEVICE)].sum().item()
    elif kind == {kinds[1]!r}:
        torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
    elif kind == {kinds[2]!r}:
        a @ a
        ctypes.string_at(0)
    return float((a @ a).mean())


@gpu_function(name={steady!r}, gpu="any", {share}, max_workers=1, idle_timeout=60)
def go_on() -> float:
    a = torch.ones(64, 64, device=DEVICE)
    return float((a @ a).mean())
"""


def by_time(machine: Machine) -> Finding:
    """Workers have separate contexts: a neighbor must notice nothing."""
    machine.gpu()
    return _broken(machine, "time", "share='time'", contained=True)


def by_mps(machine: Machine) -> Finding:
    """A fault on the device reaches every client of the same MPS server; then all must recover."""
    vram = int(need_mps(machine).memory_bytes * _SHARE_OF_MEMORY)
    return _broken(machine, "MPS", f"share='mps', vram={vram}", contained=False)


def _broken(machine: Machine, mode: str, share: str, *, contained: bool) -> Finding:
    machine.need_module("torch")
    rows: list[tuple[Any, ...]] = []
    wrong = []
    with up(machine) as platform:
        platform.deploy(
            _SOURCE.format(
                device=machine.torch_device,
                faulty=_FAULTY,
                steady=_STEADY,
                share=share,
                kinds=_KINDS,
            )
        )
        for kind in _KINDS:
            for function, arguments in ((_FAULTY, {"kind": ""}), (_STEADY, {})):
                platform.invoke(function, **arguments)
            with _neighbor(platform) as stats:
                caller_error = _fault(platform, kind)
                recovered_s = _recovery_s(platform)
            neighbor = stats[0]
            rows.append((kind, caller_error, _seconds(recovered_s), len(neighbor.calls_s), len(neighbor.failures)))
            print(*rows[-1], *neighbor.failures[:3], sep="; ")  # intermediate results, in case the step times out
            if recovered_s is None:
                wrong.append(f"{kind}: the function did not recover within {_RECOVERY_S:.0f} s")
            if contained and neighbor.failures:
                wrong.append(f"{kind}: {len(neighbor.failures)} calls of its neighbor failed: {neighbor.failures[0]}")
            if recovered_s is None:
                break
            try:
                platform.invoke(_STEADY)
            except CallFailed as error:
                wrong.append(f"{kind}: its neighbor no longer answers: {error}")
                break
    return Finding(
        summary=f"{mode}: {len(rows)} kinds of fault, recovered after {', '.join(row[2] for row in rows)}; "
        f"failed calls of the neighbor: {', '.join(str(row[4]) for row in rows)}",
        figures={
            "faults": [
                dict(zip(("kind", "said", "recovered", "neighbour_ok", "neighbour_failed"), row, strict=True))
                for row in rows
            ]
        },
        tables=[Table(("fault", "caller's error", "recovered after", "neighbor's calls", "failed"), rows, mode)],
        wrong=wrong,
    )


@contextmanager
def _neighbor(platform: Platform) -> Iterator[list[CallStats]]:
    """Call the healthy function inside, and a moment before and after; the list then holds the statistics."""
    stop, stats = threading.Event(), []
    caller = Caller(platform.url, _STEADY, {})
    thread = threading.Thread(target=lambda: stats.append(caller.for_seconds(300, stop)))
    thread.start()
    try:
        time.sleep(_QUIET_S)
        yield stats
        time.sleep(_QUIET_S)
    finally:
        stop.set()
        thread.join()


def _fault(platform: Platform, kind: str) -> str:
    """Return the error that the caller gets, shortened."""
    try:
        platform.invoke(_FAULTY, kind=kind)
    except CallFailed as error:
        return str(error)[:160]
    return "a result"


def _recovery_s(platform: Platform) -> float | None:
    """Return the seconds until a call of the function succeeds again; None if none did in time."""
    started = time.perf_counter()
    while time.perf_counter() - started < _RECOVERY_S:
        try:
            platform.invoke(_FAULTY, kind="")
        except CallFailed:
            time.sleep(0.05)
        else:
            return time.perf_counter() - started
    return None


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"
