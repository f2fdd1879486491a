"""Models behind HTTP: the serving overhead on top of ONNX Runtime, batching under load, large tensors, the build cache.

    python benchmarks/models.py [--seconds 3] [--rounds 3] [--no-peers]

All servers of a model run at the same time and are measured in turns, while polling servers are stopped. The bare
session runs in this process. Against 16 connections it runs 16 rows at a time.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

import measure
import networks
from gpufn import Model
from gpufn.client.client import Client
from gpufn.deploy.build_wait import upload, wait_until_ended
from gpufn.deploy.model_files import prepare
from model_servers import Bare, serving, versions

_MODELS = ("resnet18", "encoder")
_PEERS = ("uvicorn", "litserve", "bentoml", "pytriton")
_LARGE_PEERS = ("uvicorn", "litserve", "pytriton")
_MAX_BATCH = 16
_CONNECTIONS = (1, 16)
_LARGE_CONNECTIONS = (1, 4)
_CACHED_BUILDS = 9
# A single caller leaves pauses between the runs, and a run after a pause takes longer even without a server.
_BARE = {"bare session": 0.0, "bare session, after 1.5 ms of sleep": 0.0015}  # seconds before each run

Loads = dict[str, dict[int, list[measure.Load]]]  # by server and connections


def main() -> None:
    options = measure.arguments("Models.", seconds=3.0, rounds=3)
    about = measure.machine()
    about["versions"] |= {} if options.no_peers else versions()
    peers, large_peers = ((), ()) if options.no_peers else (_PEERS, _LARGE_PEERS)
    result: dict[str, Any] = {"seconds": options.seconds, "rounds": options.rounds, "models": {}}
    with tempfile.TemporaryDirectory() as folder, measure.gpufn_up() as platform:
        files = {name: _written(name, Path(folder)) for name in (*_MODELS, "negative")}
        result["build"] = _builds(platform, files["resnet18"])
        for name in _MODELS:
            with serving(platform, files[name], max_batch=_MAX_BATCH, peers=peers) as (bare, servers):
                _warm_up(servers, max(_CONNECTIONS))
                loads: Loads = defaultdict(lambda: defaultdict(list))
                for number in range(options.rounds):
                    for connections in _CONNECTIONS:
                        for title, pause_s in _BARE.items():
                            with measure.paused(servers):
                                load = _bare_load(bare, name, connections, options.seconds / 3, pause_s=pause_s)
                            loads[title][connections].append(load)
                        for server in _rotated(servers, number):
                            with measure.paused(servers, but=server):
                                _load(server, number, connections, options.seconds, loads)
            result["models"][name] = {"threads": bare.threads, "servers": _medians(loads)}
        with serving(platform, files["negative"], max_batch=1, peers=large_peers) as (_, servers):
            result["large"] = _large(servers, options.rounds, options.seconds)
    measure.write("models", result, _tables(result), about)


def _written(name: str, folder: Path) -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(getattr(networks, name)(), path)
    return path


# ---- the build cache


def _builds(platform: measure.Server, file: Path) -> dict[str, Any]:
    """Return the seconds from `POST /v1/builds` to SUCCEEDED, of the first build and of repeated ones."""
    spec, paths = prepare("model", Model(str(file), max_batch=_MAX_BATCH), file.parent)
    with Client(platform.url) as client:
        upload(client, paths)
        taken = []
        for _ in range(_CACHED_BUILDS + 1):
            start = time.perf_counter()
            wait_until_ended(client, client.create_build(spec))
            taken.append(time.perf_counter() - start)
    again = [round(seconds * 1e3, 1) for seconds in taken[1:]]
    return {"first_s": round(taken[0], 1), "again_ms": statistics.median(again), "all_again_ms": again}


# ---- load


def _warm_up(servers: list[measure.Server], connections: int) -> None:
    for server in servers:
        with measure.paused(servers, but=server):
            measure.wrk(server, connections, 1)


def _bare_load(bare: Bare, name: str, rows: int, seconds: float, *, pause_s: float = 0.0) -> measure.Load:
    """Return the rows per second and the duration of a run; `pause_s` of sleep before each run does not count."""
    inputs = networks.inputs(name, rows)
    bare.run(inputs)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter()
        bare.run(inputs)
        taken.append((time.perf_counter() - start) * 1e3)
    taken.sort()
    p50, p99 = (taken[int(part * len(taken))] for part in (0.5, 0.99))
    return measure.Load(rows * len(taken) / sum(taken) * 1e3, p50, p99, 0, len(taken))


def _rotated(servers: list[measure.Server], number: int) -> list[measure.Server]:
    """Rotate the order each round, so that no server always follows the same one."""
    return servers[number % len(servers) :] + servers[: number % len(servers)]


def _load(server: measure.Server, number: int, connections: int, seconds: float, loads: Loads) -> None:
    load = measure.wrk(server, connections, seconds)
    time.sleep(0.2)
    loads[server.name][connections].append(load)
    print(f"round {number + 1}  {server.name:10} {connections:3}  {load.per_second:8,.0f}/s", file=sys.stderr)


def _medians(loads: Loads) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        name: {
            str(connections): {
                "per_second": round(statistics.median(load.per_second for load in rounds), 1),
                "p50_ms": round(statistics.median(load.p50_ms for load in rounds), 3),
                "p99_ms": round(statistics.median(load.p99_ms for load in rounds), 3),
                "failed": sum(load.failed for load in rounds),
                "all_per_second": [round(load.per_second, 1) for load in rounds],
                "all_p50_ms": [round(load.p50_ms, 3) for load in rounds],
            }
            for connections, rounds in by_connections.items()
        }
        for name, by_connections in loads.items()
    }


# ---- large tensors


def _large(servers: list[measure.Server], rounds: int, seconds: float) -> dict[str, Any]:
    _warm_up(servers, max(_LARGE_CONNECTIONS))
    loads: Loads = defaultdict(lambda: defaultdict(list))
    memory: dict[str, Any] = {server.name: {"after": [], "most": {}} for server in servers}
    for number in range(rounds):
        for connections in _LARGE_CONNECTIONS:
            for server in _rotated(servers, number):
                with measure.paused(servers, but=server), _watched(server, memory[server.name]["most"]):
                    _load(server, number, connections, seconds, loads)
                memory[server.name]["after"].append(_memory_mib(server))
    return {"servers": _medians(loads), "memory_mib": memory}


def _memory_mib(server: measure.Server) -> dict[str, float]:
    """Return resident memory by process, and the use of /dev/shm. Shared memory counts for each process."""
    by_name: dict[str, float] = defaultdict(float)
    for each in measure.usage(server.process.pid).values():
        by_name[each.name] += each.rss_bytes / 2**20
    by_name["/dev/shm"] = measure.shared_memory_bytes() / 2**20
    return {name: round(mib, 1) for name, mib in by_name.items()}


@contextlib.contextmanager
def _watched(server: measure.Server, peak: dict[str, float]) -> Iterator[None]:
    """Record the peak memory of each process in `peak`."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            for name, mib in _memory_mib(server).items():
                peak[name] = max(mib, peak.get(name, 0.0))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# ---- the page


def _tables(result: dict[str, Any]) -> str:
    page: str = f"Medians of {result['rounds']} interleaved rounds of {result['seconds']:g} s each; wrk, one thread.\n"
    for name, model in result["models"].items():
        threads = f"threads of a run: {model['threads']}"
        page += f"\n## {name}, up to {_MAX_BATCH} rows a run, {threads}\n\n" + _load_table(
            model["servers"], _CONNECTIONS, "bare session"
        )
    page += "\n## 10 MiB in, 10 MiB out\n\n" + _load_table(result["large"]["servers"], _LARGE_CONNECTIONS, "gpufn")
    page += "\nResident MiB after the first load, after the last, and the peak under load:\n\n"
    page += _memory_table(result["large"]["memory_mib"])
    build = result["build"]
    page += (
        f"\n## Builds\n\nresnet18: first build {build['first_s']} s; repeated {build['again_ms']:.0f} ms, median of "
        f"{len(build['all_again_ms'])} (at most {max(build['all_again_ms']):.0f}).\n"
    )
    return page


def _load_table(servers: dict[str, Any], connections: tuple[int, ...], against: str) -> str:
    titles = ("calls/s", "p50 ms", "p99 ms", f"of {against}'s")
    headers = ["server", *(f"{title} at {n}" for n in connections for title in titles), "failed"]
    rows = []
    for name, by in servers.items():
        row: list[object] = [name]
        for n in map(str, connections):
            share = by[n]["per_second"] / servers[against][n]["per_second"]
            row += [f"{by[n]['per_second']:,.0f}", f"{by[n]['p50_ms']:.2f}", f"{by[n]['p99_ms']:.2f}", f"{share:.2f}"]
        rows.append([*row, sum(load["failed"] for load in by.values())])
    return measure.table(headers, rows)


def _memory_table(memory: dict[str, Any]) -> str:
    rows = [
        [
            server,
            process,
            *(f"{mib.get(process, 0):.0f}" for mib in (seen["after"][0], seen["after"][-1], seen["most"])),
        ]
        for server, seen in memory.items()
        for process in seen["after"][-1]
    ]
    return measure.table(["server", "process", "first", "last", "peak"], rows)


if __name__ == "__main__":
    main()
