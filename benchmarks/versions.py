"""This version of gpufn and another one, in turns: cold starts from a standby, an echo over HTTP, and memory.

    python benchmarks/versions.py --other PYTHON [--starts 25] [--rounds 5] [--seconds 4]

`--other` is the interpreter of another checkout's environment. Both platforms run at the same time, and each round
exchanges their order.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import httpx

import measure
from coldstart import call_from_zero_s

_CONNECTIONS = (1, 8, 64)
_STARTS = "cold start, ms"


def main() -> None:
    options = measure.arguments("Two versions.", other="", starts=25, rounds=5, seconds=4.0)
    if not options.other:
        raise SystemExit("--other is missing: the Python of an environment with the other version")
    about = measure.machine()
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    pythons = {"other": options.other, "this": sys.executable}
    with contextlib.ExitStack() as stack:
        platforms = {name: stack.enter_context(measure.gpufn_up(python)) for name, python in pythons.items()}
        clients = {}
        for name, platform in platforms.items():
            measure.deploy(platform, "cold_empty", "echo")
            clients[name] = stack.enter_context(httpx.Client(base_url=platform.url, timeout=120))
            call_from_zero_s(clients[name], "cold-empty")  # fills caches
        for name in _turns(options.starts):
            figures[_STARTS][name].append(round(call_from_zero_s(clients[name], "cold-empty") * 1e3, 3))
        for connections in _CONNECTIONS:
            for name in _turns(options.rounds):
                platform = platforms[name]
                invoke = platform.url + "/v1/functions/echo/invoke"
                httpx.post(invoke, json={"x": 1}, timeout=60).raise_for_status()
                before = _cpu_s(platform)
                load = measure.wrk(measure.Server(name, invoke, platform.process), connections, options.seconds)
                time.sleep(0.2)
                used_us = (_cpu_s(platform) - before) / max(load.requests, 1) * 1e6
                figures[f"echo, calls/s at {connections}"][name].append(load.per_second)
                figures[f"echo, µs of CPU per call at {connections}"][name].append(round(used_us, 1))
        for name in _turns(options.rounds):
            usage = measure.usage(platforms[name].process.pid)
            figures["memory, MiB"][name].append(round(sum(each.pss_bytes for each in usage.values()) / 2**20, 1))
    measure.write("versions", {"figures": figures}, _table(figures), about)


def _turns(count: int) -> Iterator[str]:
    for number in range(count):
        yield from ("other", "this") if number % 2 else ("this", "other")


def _cpu_s(platform: measure.Server) -> float:
    return sum(each.cpu_s for each in measure.usage(platform.process.pid).values())


def _table(figures: dict[str, dict[str, list[float]]]) -> str:
    rows: list[list[Any]] = []
    for title, by_version in figures.items():
        other, this = (statistics.median(by_version[name]) for name in ("other", "this"))
        ratios = [now / before for now, before in zip(by_version["this"], by_version["other"], strict=True)]
        rows.append([title, f"{other:,.1f}", f"{this:,.1f}", f"{this / other:.2f}", f"{_quartiles(ratios)}"])
    return measure.table(["figure", "other", "this", "ratio", "quartiles of the pairs' ratios"], rows)


def _quartiles(values: list[float]) -> str:
    lower, _, upper = statistics.quantiles(values, n=4)
    return f"{lower:.2f} to {upper:.2f}"


if __name__ == "__main__":
    main()
