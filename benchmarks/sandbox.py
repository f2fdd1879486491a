"""Cost of the sandbox: cold starts from a standby and warm calls, with GPUFN_ISOLATION=off and auto, in turns. Then
both platforms are idle, each with a warm worker and a template.

python benchmarks/sandbox.py [--rounds 15] [--calls 500] [--seconds 20]
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from typing import Any

import httpx

import measure
from coldstart import call_from_zero_s

_WAYS = ("off", "auto")


def main() -> None:
    options = measure.arguments("Cost of the sandbox.", rounds=15, calls=500, seconds=20.0)
    starts: dict[str, list[float]] = {way: [] for way in _WAYS}
    calls: dict[str, list[float]] = {way: [] for way in _WAYS}
    with ExitStack() as stack:
        clients, platforms = {}, {}
        for way in _WAYS:
            platform = platforms[way] = stack.enter_context(measure.gpufn_up(GPUFN_ISOLATION=way))
            measure.deploy(platform, "cold_empty", "echo")
            clients[way] = stack.enter_context(httpx.Client(base_url=platform.url, timeout=120))
            call_from_zero_s(clients[way], "cold-empty")
        for _ in range(options.rounds):
            for way, client in clients.items():
                starts[way].append(call_from_zero_s(client, "cold-empty"))
        for _ in range(5):
            for way, client in clients.items():
                calls[way] += _echo_s(client, options.calls // 5)
        idle = _idle(platforms, options.seconds)
    result = {
        "rounds": options.rounds,
        "start": {way: _summary(seconds) for way, seconds in starts.items()},
        "echo": {way: _summary(seconds) for way, seconds in calls.items()},
        "idle": idle,
    }
    measure.write("sandbox", result, _table(result), measure.machine())


def _echo_s(client: httpx.Client, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        client.post("/v1/functions/echo/invoke", json={"x": 1}).raise_for_status()
        taken.append(time.perf_counter() - start)
    return taken


def _idle(platforms: dict[str, measure.Server], seconds: float) -> dict[str, dict[str, float]]:
    """Return the memory and the CPU time of both platforms, which are idle at the same time."""
    before = {way: measure.usage(platform.process.pid) for way, platform in platforms.items()}
    time.sleep(seconds)
    idle = {}
    for way, platform in platforms.items():
        after = measure.usage(platform.process.pid)
        used_s = sum(now.cpu_s - before[way][pid].cpu_s for pid, now in after.items() if pid in before[way])
        idle[way] = {
            "pss_mib": round(sum(now.pss_bytes for now in after.values()) / 2**20, 1),
            "cpu_percent": round(used_s / seconds * 100, 2),
        }
    return idle


def _summary(seconds: list[float]) -> dict[str, Any]:
    in_ms = sorted(round(second * 1e3, 3) for second in seconds)
    return {"median_ms": statistics.median(in_ms), "min_ms": in_ms[0], "max_ms": in_ms[-1]}


def _table(result: dict[str, Any]) -> str:
    rows = [
        f"| {what} | {way} | {summary['median_ms']:.2f} | {summary['min_ms']:.2f} | {summary['max_ms']:.2f} |"
        for what in ("start", "echo")
        for way, summary in result[what].items()
    ]
    head = ["| what | GPUFN_ISOLATION | median ms | min ms | max ms |", "| --- | --- | --- | --- | --- |"]
    idle = [
        f"| {way} | {figures['pss_mib']:.1f} | {figures['cpu_percent']:.2f} |"
        for way, figures in result["idle"].items()
    ]
    idle_head = ["", "| idle: GPUFN_ISOLATION | PSS MiB | CPU % |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, *idle_head, *idle])


if __name__ == "__main__":
    main()
