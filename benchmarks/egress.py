"""Cost of network="egress": cold starts from a standby with the node's network and with egress, in turns.

The node must forward packets. In network namespaces, as root, the machine keeps its settings:

unshare --net --mount sh -c 'ip link set lo up; sysctl -qw net.ipv4.ip_forward=1; python benchmarks/egress.py'
"""

from __future__ import annotations

import statistics
from typing import Any

import httpx

import measure
from coldstart import call_from_zero_s

_FUNCTIONS = {"full": "cold-empty", "egress": "cold-egress"}


def main() -> None:
    options = measure.arguments('Cost of network="egress".', rounds=30)
    taken: dict[str, list[float]] = {way: [] for way in _FUNCTIONS}
    with measure.gpufn_up() as platform, httpx.Client(base_url=platform.url, timeout=120) as client:
        measure.deploy(platform, "cold_empty", "cold_egress")
        for function in _FUNCTIONS.values():
            call_from_zero_s(client, function)
        for _ in range(options.rounds):
            for way, function in _FUNCTIONS.items():
                taken[way].append(call_from_zero_s(client, function))
    result: dict[str, Any] = {"rounds": options.rounds, "start": {way: _summary(each) for way, each in taken.items()}}
    measure.write("egress", result, _table(result), measure.machine())


def _summary(seconds: list[float]) -> dict[str, float]:
    in_ms = sorted(round(second * 1e3, 3) for second in seconds)
    return {"median_ms": statistics.median(in_ms), "min_ms": in_ms[0], "max_ms": in_ms[-1]}


def _table(result: dict[str, Any]) -> str:
    rows = [
        f"| {way} | {each['median_ms']:.2f} | {each['min_ms']:.2f} | {each['max_ms']:.2f} |"
        for way, each in result["start"].items()
    ]
    return "\n".join(["| network | median ms | min ms | max ms |", "| --- | --- | --- | --- |", *rows])


if __name__ == "__main__":
    main()
