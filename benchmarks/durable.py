"""Durable calls: acceptance rate, end-to-end rate, and the cost of a long backlog.

    python benchmarks/durable.py [--seconds 4] [--rounds 3] [--calls 5000] [--queued 1000000] [--no-peers]

accepted    202 responses over HTTP at 64 connections while all calls wait; and at 256 while a worker runs them
end to end  from the first submission until all results are stored; Celery, Dramatiq and taskiq in turns
waiting     latency of status requests, and memory per process, while a few, 100,000 and `--queued` calls wait
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

import measure
import task_queues
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams

T = TypeVar("T")

CONNECTIONS = 64
MANY_CONNECTIONS = 256  # for a client that submits as much as it can and waits for all of it
KEPT = "written to a file, synced every two minutes"
_LOOK_EVERY_S = 0.02
_LOOKS = 30  # status requests per call
_SUBMIT = measure.Post("", b'{"x": 0}', {"Content-Type": "application/json"})
_LONG_S = 100_000


class Platform:
    """A platform with `held`, whose only worker is busy with the first call so that others wait, and `noop`."""

    def __init__(self, server: measure.Server) -> None:
        self.server = server
        measure.deploy(server, "noop")
        answer = httpx.post(f"{server.url}/v1/functions/noop/invoke", json={"x": 1}, timeout=60)
        assert answer.json() == 1, answer.text
        self.submit("held", _LONG_S)

    def submit(self, function: str, x: int = 0) -> str:
        answer = httpx.post(self._url(function), json={"x": x}, timeout=30)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def load(self, function: str, seconds: float, connections: int = CONNECTIONS) -> measure.Load:
        target = measure.Server(function, self._url(function), self.server.process, post=_SUBMIT)
        return measure.wrk(target, connections, seconds)

    def status_ms(self, invocation: str) -> list[float]:
        samples = []
        with httpx.Client(base_url=self.server.url) as client:
            for _ in range(_LOOKS):
                start = time.perf_counter()
                answer = client.get(f"/v1/invocations/{invocation}")
                samples.append((time.perf_counter() - start) * 1e3)
                assert answer.json()["state"] == "queued", answer.text
        return samples

    def used(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return by process: CPU seconds since its start, MiB of resident memory."""
        cpu_s: dict[str, float] = defaultdict(float)
        mib: dict[str, float] = defaultdict(float)
        for each in measure.usage(self.server.process.pid).values():
            cpu_s[each.name] += each.cpu_s
            mib[each.name] += each.rss_bytes / 2**20
        return cpu_s, mib

    def waiting(self, function: str) -> int:
        """Return the number of submitted calls that have not ended."""
        return self._with_bus(lambda bus: _depth(bus, function))

    def wait_until_ended(self, function: str) -> None:
        async def wait(bus: Bus) -> None:
            while await _depth(bus, function):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_EVERY_S)

        self._with_bus(wait)

    def results(self) -> int:
        """Return the number of stored results."""

        async def count(bus: Bus) -> int:
            return int((await bus.js(f"STREAM.INFO.{subjects.RESULTS}"))["state"]["messages"])

        return self._with_bus(count)

    def _url(self, function: str) -> str:
        return f"{self.server.url}/v1/functions/{function}/submit"

    def _with_bus(self, query: Callable[[Bus], Awaitable[T]]) -> T:
        nats = Path(self.server.environ["GPUFN_HOME"]) / "nats"
        password = json.loads((nats / "credentials.json").read_bytes())["admin"]

        async def connected() -> T:
            bus = await Bus.connect(
                f"nats://admin:{password}@127.0.0.1:{(nats / 'port').read_text()}", name="benchmark"
            )
            try:
                return await query(bus)
            finally:
                await bus.close()

        return asyncio.run(connected())


async def _depth(bus: Bus, function: str) -> int:
    depth = (await streams.depths(bus)).get((function, 1))
    return 0 if depth is None else depth.asynchronous


def main() -> None:
    options = measure.arguments(
        "Durable calls.", seconds=4.0, rounds=3, calls=5000, queued=1_000_000
    )  # fmt: skip
    about = measure.machine()
    with contextlib.ExitStack() as stack:
        platform = Platform(stack.enter_context(measure.gpufn_up()))
        peers = [] if options.no_peers else _peers(stack, about)
        accepted: dict[str, list[dict[str, Any]]] = defaultdict(list)
        ended: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for number in range(options.rounds):
            with measure.paused([peer.worker for peer in peers]):
                accepted[f"while all wait, at {CONNECTIONS}"].append(_accepted(platform, options.seconds))
                load, whole = _end_to_end(platform, options.seconds)
                accepted[f"while a worker runs them, at {MANY_CONNECTIONS}"].append(load)
                ended["gpufn"].append(whole)
            for peer in peers:
                with measure.paused([each.worker for each in peers], but=peer.worker):
                    try:
                        report = peer.run(options.calls)
                    except subprocess.SubprocessError as error:
                        print(f"skipped {peer.name} in round {number + 1}: {error}", file=sys.stderr)
                    else:
                        ended[f"{peer.name}, {peer.store.name}"].append(_peer_result(peer, options.calls, report))
            print(
                f"round {number + 1}", {name: runs[-1]["per_second"] for name, runs in ended.items()}, file=sys.stderr
            )
        with measure.paused([peer.worker for peer in peers]):
            waiting = _waiting(platform, options.queued)
    result = {"rounds": options.rounds, "accepted": accepted, "end_to_end": ended, "waiting": waiting}
    measure.write("durable", result, _tables(result), about)


def _peers(stack: contextlib.ExitStack, about: dict[str, Any]) -> list[task_queues.TaskQueue]:
    python = measure.peers_python()
    queues = []
    stores: dict[str, list[task_queues.Store]] = {}
    for name in task_queues.available(python):
        about["versions"][name] = measure.version_in(python, name)
        kind = "nats" if name == "taskiq" else "redis"
        if kind not in stores:
            created = [task_queues.nats()] if kind == "nats" else [task_queues.redis(log=log) for log in (True, False)]
            stores[kind] = [stack.enter_context(each) for each in created]
        queues += [stack.enter_context(task_queues.task_queue(name, python, store)) for store in stores[kind]]
    return queues


def _accepted(platform: Platform, seconds: float) -> dict[str, Any]:
    before, _ = platform.used()
    load = platform.load("held", seconds)
    return _load(load, before, platform.used()[0])


def _end_to_end(platform: Platform, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the acceptance rate while a worker runs the calls; and the rate until all results are stored."""
    before, _ = platform.used()
    stored = platform.results()
    start = time.perf_counter()
    load = platform.load("noop", seconds, MANY_CONNECTIONS)
    accepted = _load(load, before, platform.used()[0])
    platform.wait_until_ended("noop")
    total_s = time.perf_counter() - start
    assert platform.results() - stored >= load.requests, "a result is missing"
    cpu_us = _cpu_us(before, platform.used()[0], load.requests)
    return accepted, {
        "calls": load.requests,
        "per_second": round(load.requests / total_s),
        "cpu_us": cpu_us,
        "kept": KEPT,
    }


def _load(load: measure.Load, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    return {
        "per_second": round(load.per_second),
        "p50_ms": load.p50_ms,
        "p99_ms": load.p99_ms,
        "failed": load.failed,
        "cpu_us": _cpu_us(before, after, load.requests),
    }


def _cpu_us(before: dict[str, float], after: dict[str, float], calls: int) -> dict[str, int]:
    """Return the CPU time per call, by process."""
    spent = {name: round((cpu_s - before.get(name, 0.0)) / calls * 1e6) for name, cpu_s in after.items()}
    return {name: us for name, us in spent.items() if us > 0}


def _peer_result(peer: task_queues.TaskQueue, calls: int, report: dict[str, float]) -> dict[str, Any]:
    cpu_us = {"all": round(report["cpu_s"] / calls * 1e6)}
    return {"calls": calls, "per_second": round(calls / report["total_s"]), "cpu_us": cpu_us, "kept": peer.store.kept}


def _waiting(platform: Platform, most: int) -> list[dict[str, Any]]:
    rows = []
    marked = [platform.submit("held")]
    present = platform.waiting("held")
    for wanted in sorted({each for each in (1_000, 100_000) if present < each < most} | {most}):
        while (missing := wanted - platform.waiting("held")) > 0:
            platform.load("held", max(1, min(20, missing / 10_000)))
            marked.append(platform.submit("held"))
        rows.append(_backlog_row(platform, marked))
    return rows


def _backlog_row(platform: Platform, marked: list[str]) -> dict[str, Any]:
    took = [
        ms for invocation in (marked[0], marked[len(marked) // 2], marked[-1]) for ms in platform.status_ms(invocation)
    ]
    row = {
        "waiting": platform.waiting("held"),
        "status_p50_ms": round(statistics.median(took), 1),
        "status_p95_ms": round(statistics.quantiles(took, n=20)[-1], 1),
        "status_worst_ms": round(max(took), 1),
        "rss_mib": {name: round(mib) for name, mib in platform.used()[1].items()},
    }
    print(row, file=sys.stderr)
    return row


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


def _cost(runs: list[dict[str, Any]]) -> str:
    names = dict.fromkeys(name for run in runs for name in run["cpu_us"])
    each = {name: round(statistics.median(run["cpu_us"].get(name, 0) for run in runs)) for name in names}
    parts = ", ".join(f"{name} {us}" for name, us in sorted(each.items(), key=lambda entry: -entry[1]))
    return f"{sum(each.values()):,} ({parts})" if len(each) > 1 else f"{sum(each.values()):,}"


def _tables(result: dict[str, Any]) -> str:
    accepted = [
        [
            name,
            f"{_median(runs, 'per_second'):,.0f}",
            f"{_median(runs, 'p50_ms'):.0f}",
            f"{_median(runs, 'p99_ms'):.0f}",
            _cost(runs),
        ]
        for name, runs in result["accepted"].items()
    ]
    ours = _median(result["end_to_end"]["gpufn"], "per_second")
    ended = [
        [
            name,
            f"{_median(runs, 'per_second'):,.0f}",
            f"{_median(runs, 'per_second') / ours:.2f}",
            _cost(runs),
            runs[0]["kept"],
        ]
        for name, runs in result["end_to_end"].items()
    ]
    roles = list(dict.fromkeys(role for row in result["waiting"] for role in row["rss_mib"]))
    waiting = [
        [
            f"{row['waiting']:,}",
            row["status_p50_ms"],
            row["status_p95_ms"],
            row["status_worst_ms"],
            *(row["rss_mib"].get(role, "") for role in roles),
        ]
        for row in result["waiting"]
    ]
    cost = "CPU µs per call"
    page: str = (
        f"Medians of {result['rounds']} rounds in turns.\n\n"
        "Accepted over HTTP, by the number of connections:\n\n"
        + measure.table(["submits", "per second", "p50 ms", "p99 ms", cost], accepted)
        + "\nEnd to end: the same call that does nothing, one worker process each, until all results are stored. "
        "gpufn's are submitted over HTTP, with their arguments checked; the others' by a client of their own, "
        "straight to their server.\n\n"
        + measure.table(["queue", "calls/s", "of gpufn", cost, "storage of an accepted call"], ended)
        + "\nWith a backlog of waiting calls: status of the first, a middle and the last call; resident MiB.\n\n"
        + measure.table(["waiting", "status p50 ms", "p95", "worst", *roles], waiting)
    )
    return page


if __name__ == "__main__":
    main()
