"""Overhead of the platform per call: an echo over HTTP, side by side with other servers, in interleaved rounds.

    python benchmarks/overhead.py [--seconds 4] [--rounds 3] [--no-peers]

All servers run at the same time, and polling servers are stopped while another is measured, so that each round measures
the same machine.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import httpx

import measure

CONNECTIONS = (1, 8, 64)
_PEERS: dict[str, dict[str, str]] = {
    "litserve": {},
    "bentoml": {},
    "ray": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"},
}


def main() -> None:
    options = measure.arguments("The platform's overhead per call.", seconds=4.0, rounds=3)
    about = measure.machine()
    peers_python = measure.peers_python()
    with contextlib.ExitStack() as stack:
        platform = stack.enter_context(measure.gpufn_up())
        measure.deploy(platform, "echo")
        invoke = f"{platform.url}/v1/functions/{{}}/invoke"
        servers = [stack.enter_context(measure.peer("starlette", sys.executable))]
        for name in ("echo", "echo-async", "echo-single"):
            _answer_once(invoke.format(name))
            servers.append(measure.Server(f"gpufn {name}", invoke.format(name), platform.process))
        for name, environ in {} if options.no_peers else _PEERS.items():
            if measure.has(peers_python, name):
                about["versions"][name] = measure.version_in(peers_python, name)
                servers.append(stack.enter_context(measure.peer(name, peers_python, measure.ECHO, **environ)))
            else:
                print(f"skipped {name}: not installed in {peers_python}", file=sys.stderr)
        for server in servers:
            with measure.paused(servers, but=server):
                measure.wrk(server, 8, 1)
        loads, costs = _rounds(servers, options.rounds, options.seconds)
    result = {
        "seconds": options.seconds,
        "rounds": options.rounds,
        "servers": _medians(loads),
        "cpu_us_per_call": costs,
    }
    measure.write("overhead", result, _tables(result), about)


def _answer_once(url: str) -> None:
    answer = httpx.post(url, json={"x": 1}, timeout=60)
    assert answer.json() == {"x": 1}, answer.text


def _rounds(
    servers: list[measure.Server], rounds: int, seconds: float
) -> tuple[dict[str, dict[int, list[measure.Load]]], dict[str, dict[str, float]]]:
    """Return loads by server and connections, and per server the CPU µs per call of each process at 8 connections."""
    loads: dict[str, dict[int, list[measure.Load]]] = defaultdict(lambda: defaultdict(list))
    costs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(rounds):
        for connections in CONNECTIONS:
            # Rotate the order each round, so that no server always follows the same one.
            for server in servers[number % len(servers) :] + servers[: number % len(servers)]:
                with measure.paused(servers, but=server):
                    before = measure.usage(server.process.pid)
                    load = measure.wrk(server, connections, seconds)
                    time.sleep(0.2)
                    after = measure.usage(server.process.pid)
                loads[server.name][connections].append(load)
                print(
                    f"round {number + 1}  {server.name:16} {connections:3}  {load.per_second:9,.0f}/s", file=sys.stderr
                )
                if connections == 8:
                    for role, cpu_s in _spent(before, after).items():
                        costs[server.name][role].append(cpu_s / max(load.requests, 1) * 1e6)
    medians = {name: {role: round(statistics.median(us), 1) for role, us in by.items()} for name, by in costs.items()}
    return loads, medians


def _spent(before: dict[int, measure.Usage], after: dict[int, measure.Usage]) -> dict[str, float]:
    spent: dict[str, float] = defaultdict(float)
    for pid, now in after.items():
        spent[now.name] += now.cpu_s - (before[pid].cpu_s if pid in before else 0.0)
    return spent


def _medians(loads: dict[str, dict[int, list[measure.Load]]]) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        name: {
            str(connections): {
                "per_second": statistics.median(load.per_second for load in rounds),
                "p50_ms": round(statistics.median(load.p50_ms for load in rounds), 3),
                "p99_ms": round(statistics.median(load.p99_ms for load in rounds), 3),
                "failed": sum(load.failed for load in rounds),
                "all_per_second": [load.per_second for load in rounds],
            }
            for connections, rounds in by_connections.items()
        }
        for name, by_connections in loads.items()
    }


def _tables(result: dict[str, Any]) -> str:
    servers, costs = result["servers"], result["cpu_us_per_call"]
    headers = ["server", "p50 ms at 1", *(f"{title} at {n}" for n in CONNECTIONS for title in ("calls/s", "p99 ms"))]
    headers += [f"of Starlette at {n}" for n in CONNECTIONS] + ["failed"]
    rows = []
    for name, by in servers.items():
        loads = [by[str(n)] for n in CONNECTIONS]
        row: list[object] = [name, f"{loads[0]['p50_ms']:.2f}"]
        for load in loads:
            row += [f"{load['per_second']:,.0f}", f"{load['p99_ms']:.2f}"]
        for n, load in zip(CONNECTIONS, loads, strict=True):
            row.append(f"{load['per_second'] / servers['starlette'][str(n)]['per_second']:.2f}")
        rows.append([*row, sum(load["failed"] for load in loads)])
    spent = [
        [name, role, f"{us:.0f}"]
        for name, by in costs.items()
        for role, us in sorted(by.items(), key=lambda entry: -entry[1])
        if us >= 1
    ]
    page: str = (
        f"Medians of {result['rounds']} interleaved rounds of {result['seconds']:g} s each; wrk, one thread.\n\n"
        + measure.table(headers, rows)
        + "\nCPU time per call at 8 connections, without wrk's own:\n\n"
        + measure.table(["server", "process", "µs per call"], spent)
    )
    return page


if __name__ == "__main__":
    main()
