"""Cold starts: time from no worker to the first reply over HTTP, with and without a template process.

    python benchmarks/coldstart.py [--rounds 9] [--many 50] [--no-peers] [--docker]

A round waits until the function has scaled to zero, then makes one call and measures the time at the client. For
comparison, `python -c "import …"` of the same modules is the minimum for a process that is started for the call.

--docker measures only the empty function, in containers and in processes. GPUFN_BASE_IMAGE and the agent's other Docker
settings apply.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx

import measure

_FUNCTIONS = {"cold_empty": "", "cold_numpy": "numpy", "cold_torch": "torch"}
_ZERO_TIMEOUT_S = 60.0
_MANY = """\
from gpufn import gpu_function


@gpu_function(idle_timeout=0.5, scaledown_window=0.5)
def many_{number}() -> int:
    return {number}
"""


def main() -> None:
    options = measure.arguments("Cold starts.", rounds=9, many=50, docker=False)
    about = measure.machine()
    python = sys.executable
    if options.docker:
        contained = _in_containers(options.rounds)
        measure.write("coldstart-docker", contained, _docker_table(contained), about)
        return
    functions = {name: module for name, module in _FUNCTIONS.items() if not module or measure.has(python, module)}
    for name in _FUNCTIONS.keys() - functions.keys():
        print(f"{_FUNCTIONS[name]} is not installed: {name} left out", file=sys.stderr)
    result: dict[str, Any] = {"rounds": options.rounds, "functions": {}, "after_deploy": {}, "import_only": {}}
    for name, module in functions.items():
        result["import_only"][name] = _summary([_import_s(module) for _ in range(options.rounds)])
    for standby, environ in {"standby": {}, "no standby": {"GPUFN_TEMPLATES": "0"}}.items():
        result["after_deploy"][standby] = {
            name: _summary([_after_deploy_s(name, environ) for _ in range(options.rounds)]) for name in functions
        }
        with measure.gpufn_up(**environ) as platform, httpx.Client(base_url=platform.url, timeout=120) as client:
            measure.deploy(platform, *functions)
            result["functions"][standby] = {
                name: _summary(
                    [call_from_zero_s(client, name.replace("_", "-")) for _ in range(options.rounds + 1)][1:]
                )
                for name in functions
            }
    result["many"] = _many(options.many)
    ray = measure.peers_python()
    if not options.no_peers and measure.has(ray, "ray"):
        about["versions"]["ray"] = measure.version_in(ray, "ray")
        result["ray"] = _summary(_ray(ray, max(options.rounds // 3, 1)))
    measure.write("coldstart", result, _tables(result), about)


def _in_containers(rounds: int) -> dict[str, Any]:
    """Measure the empty function in turns, so that other load on the machine affects all ways alike."""
    ways = {
        "container, standby": {"GPUFN_LAUNCHER": "docker"},
        "container, from nothing": {"GPUFN_LAUNCHER": "docker", "GPUFN_TEMPLATES": "0"},
        "process, standby": {},
        "process, from nothing": {"GPUFN_TEMPLATES": "0"},
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    with ExitStack() as stack:
        clients = {}
        for way, environ in ways.items():
            platform = stack.enter_context(measure.gpufn_up(**environ))
            measure.deploy(platform, "cold_empty")
            clients[way] = stack.enter_context(httpx.Client(base_url=platform.url, timeout=600))
            call_from_zero_s(clients[way], "cold-empty")  # builds the image
        for _ in range(rounds):
            for way, client in clients.items():
                taken[way].append(call_from_zero_s(client, "cold-empty"))
    return {"rounds": rounds, "ways": {way: _summary(seconds) for way, seconds in taken.items()}}


def _import_s(module: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}" if module else ""], check=True)
    return time.perf_counter() - start


def call_from_zero_s(client: httpx.Client, function: str) -> float:
    """Return the seconds of a call to a function without workers. Callers discard the first one, which fills caches."""
    _wait_for_zero(client, function)
    start = time.perf_counter()
    answer = client.post(f"/v1/functions/{function}/invoke")
    elapsed = time.perf_counter() - start
    answer.raise_for_status()
    return elapsed


def _after_deploy_s(name: str, environ: dict[str, str]) -> float:
    """Return the seconds of the first call to a new platform, right after the deploy of its only function."""
    with measure.gpufn_up(**environ) as platform, httpx.Client(base_url=platform.url, timeout=120) as client:
        measure.deploy(platform, name)
        start = time.perf_counter()
        client.post(f"/v1/functions/{name.replace('_', '-')}/invoke").raise_for_status()
        return time.perf_counter() - start


def _wait_for_zero(client: httpx.Client, function: str) -> None:
    deadline = time.monotonic() + _ZERO_TIMEOUT_S
    while time.monotonic() < deadline:
        workers = client.get(f"/v1/functions/{function}").raise_for_status().json()["workers"]
        if not any(workers.values()):
            time.sleep(1.0)  # time to recreate the template process, if it has to be
            return
        time.sleep(0.1)
    raise RuntimeError(f"{function} did not scale to zero in {_ZERO_TIMEOUT_S:.0f} s")


def _many(count: int) -> dict[str, Any]:
    """Call `count` functions without a worker at the same moment."""
    with measure.gpufn_up() as platform:
        measure.deploy_many(platform, _MANY, count)
        limits = httpx.Limits(max_connections=count)
        with (
            httpx.Client(base_url=platform.url, timeout=120, limits=limits) as client,
            ThreadPoolExecutor(count) as pool,
        ):
            _wait_for_zero(client, "many-0")
            start = time.perf_counter()

            def call(number: int) -> tuple[bool, float]:
                answer = client.post(f"/v1/functions/many-{number}/invoke")
                return answer.is_success and answer.json() == number, time.perf_counter() - start

            answers = list(pool.map(call, range(count)))
    seconds = [elapsed for _, elapsed in answers]
    return {"functions": count, "answered": sum(is_correct for is_correct, _ in answers)} | _summary(seconds)


def _ray(python: str, rounds: int) -> list[float]:
    """Ray Serve with min_replicas=0. `peer` makes the first call, and the replica stops within a few seconds."""
    taken = []
    with measure.peer("ray", python, RAY_MIN_REPLICAS="0") as server:
        for _ in range(rounds):
            time.sleep(15)
            start = time.perf_counter()
            httpx.post(server.url, json={"x": 1}, timeout=60).raise_for_status()
            taken.append(time.perf_counter() - start)
    return taken


def _summary(seconds: list[float]) -> dict[str, Any]:
    in_ms = [round(second * 1e3, 1) for second in seconds]
    return {
        "median_ms": round(statistics.median(in_ms), 1),
        "min_ms": min(in_ms),
        "max_ms": max(in_ms),
        "all_ms": in_ms,
    }


def _tables(result: dict[str, Any]) -> str:
    standby, bare = result["functions"]["standby"], result["functions"]["no standby"]
    rows = [
        [name.removeprefix("cold_"), *(_cell(part[name]) for part in (standby, bare, result["import_only"]))]
        for name in standby
    ]
    if "ray" in result:
        rows.append(["Ray Serve, min_replicas=0, empty", "", _cell(result["ray"]), ""])
    many = result["many"]
    first = [
        [name.removeprefix("cold_"), *(_cell(by_name[name]) for by_name in result["after_deploy"].values())]
        for name in standby
    ]
    page: str = (
        f"Milliseconds from the request to its answer, {result['rounds']} rounds each: median (min to max).\n\n"
        + measure.table(["function", "with a standby", "without", "python -c import"], rows)
        + "\nThe first call, right after the first deploy to a new platform:\n\n"
        + measure.table(["function", "with a standby", "without"], first)
        + f"\n{many['functions']} functions called at once from zero workers: {many['answered']} answered, median "
        f"{many['median_ms']:.0f} ms, last after {many['max_ms']:.0f} ms.\n"
    )
    return page


def _docker_table(result: dict[str, Any]) -> str:
    page: str = (
        f"Milliseconds from the request to its answer, the empty function, {result['rounds']} rounds in turns: median "
        "(min to max). The image is already built.\n\n"
        + measure.table(["worker in a", "first reply"], [[way, _cell(each)] for way, each in result["ways"].items()])
    )
    return page


def _cell(summary: dict[str, Any]) -> str:
    return f"{summary['median_ms']:.0f} ({summary['min_ms']:.0f} to {summary['max_ms']:.0f})"


if __name__ == "__main__":
    main()
