"""The calls page of the console with many finished calls: time per page, and memory of the gateway.

    python benchmarks/console_calls.py [--calls 1000000] [--url URL --home GPUFN_HOME]

The calls are stored on the bus as a runner stores the ends of calls, with 50 functions and three keys: 97.9 %
succeeded, 2 % failed, 0.1 % were cancelled, one in 100,000 expired. With `--home`, a running platform is measured. It
is filled unless `--calls 0`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

import measure
from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import id_at, new_stem
from gpufn_core.protocol import subjects
from gpufn_core.protocol.records import AttemptRecord, CallRecord
from gpufn_local import nats_process
from gpufn_platform.bus.connection import Bus
from gpufn_platform.queue.records import call_records

_FUNCTIONS = 50
_AT_ONCE = 400
_REPEATS = 5
_PAGE = 50
_MOST_PAGES = 100
_ERROR = ErrorInfo("function_raised", "ValueError: bad input", error_type="ValueError", traceback="x" * 1500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--url", default="")
    parser.add_argument("--home", type=Path)
    options = parser.parse_args()
    about = measure.machine()
    with _platform(options.url, options.home) as (url, home, pid):
        before = _gateway_mib(pid)
        filled_s, stored = asyncio.run(_fill(home, options.calls))
        result: dict[str, Any] = {"calls": stored, "filled_s": round(filled_s, 1), "gateway_mib_before": before}
        nats = json.loads((home / "up.json").read_bytes())["pids"]["nats"]
        result["searches"] = _searches(url, (pid, nats))
        result["index_s"] = _wait_for_index(url)
        result["searches_with_index"] = _searches(url, (pid, nats))
        result["gateway_mib_after"] = _gateway_mib(pid)
        result["gateway_mib_peak"] = _peak_mib(pid)
    measure.write("console-calls", result, _tables(result), about)


@contextlib.contextmanager
def _platform(url: str, home: Path | None) -> Iterator[tuple[str, Path, int]]:
    if home is not None:
        yield url, home, json.loads((home / "up.json").read_bytes())["pids"]["gateway"]
        return
    with measure.gpufn_up() as server:
        folder = Path(server.environ["GPUFN_HOME"])
        yield server.url, folder, json.loads((folder / "up.json").read_bytes())["pids"]["gateway"]


async def _fill(home: Path, count: int) -> tuple[float, int]:
    """Store the ends of `count` calls. Return the seconds that it took, and the number of all stored calls."""
    bus = await Bus.connect(nats_process.address_in(home / "nats"), name="bench")
    numbers, since = iter(range(count)), time.perf_counter()

    async def store() -> None:
        for number in numbers:
            await call_records.end(bus, _record(number), b'{"vector": [0.1, 0.2, 0.3]}')
            if number % 100_000 == 0:
                print(f"{number:,} calls after {time.perf_counter() - since:.0f} s", file=sys.stderr)

    await asyncio.gather(*(store() for _ in range(_AT_ONCE)))
    took = time.perf_counter() - since
    stored = (await bus.js(f"STREAM.INFO.{subjects.RESULTS}"))["state"]["messages"]
    await bus.close()
    return took, stored


def _record(number: int) -> CallRecord:
    now, lot = time.time(), random.random()
    state = InvocationState.SUCCEEDED
    if number % 100_000 == 50_000:
        state = InvocationState.EXPIRED
    elif lot < 0.02:
        state = InvocationState.FAILED
    elif lot < 0.021:
        state = InvocationState.CANCELLED
    is_ok = state is InvocationState.SUCCEEDED
    kind = OutcomeKind.SUCCEEDED if is_ok else OutcomeKind.RAISED
    started, run_s = now - 0.3, random.expovariate(4)
    node, worker = f"node-{number % 20}", f"w-{number % 400:012d}"
    return CallRecord(
        id=id_at(new_stem(), number + 1),
        function=f"prod/app-{number % 5}/fn-{number % _FUNCTIONS}",
        revision=3,
        state=state,
        submitted_at=now - 0.5,
        queue_seq=number + 1,
        started_at=started,
        ended_at=now,
        error=None if is_ok else _ERROR,
        content_type="application/json",
        queue_s=0.2,
        run_s=run_s,
        worker=worker,
        digest=f"{number:064x}",
        attempts=(AttemptRecord(1, kind, now, started, worker, node=node),),
        size=27,
        owner=("platform", "k1", "rare")[2 if number % 200_000 == 7 else number % 2],
    )


def _wait_for_index(url: str) -> float:
    """Return how long it took until a search that matches nothing was one page."""
    since = time.perf_counter()
    with httpx.Client(base_url=url, timeout=120) as client:
        while _timed(client, "/v1/calls", {"key": "none"})[1]["next"] is not None:
            time.sleep(1)
    return round(time.perf_counter() - since, 1)


def _searches(url: str, pids: tuple[int, ...]) -> dict[str, Any]:
    with httpx.Client(base_url=url, timeout=120) as client:
        newest = client.get("/v1/calls", params={"limit": _PAGE}).json()["calls"]
        oldest_s, middle = min(call["submitted_at"] for call in newest), newest[25]
        cases: dict[str, dict[str, str]] = {
            "newest": {},
            "of a function": {"function": "prod/app-2/fn-7"},
            "of an unknown function": {"function": "prod/app-2/none"},
            "failed": {"state": "failed"},
            "cancelled": {"state": "cancelled"},
            "expired (10 of all)": {"state": "expired"},
            "queued (none)": {"state": "queued"},
            "failed, of a function": {"state": "failed", "function": "prod/app-2/fn-7"},
            "expired, of a function (none)": {"state": "expired", "function": "prod/app-2/fn-7"},
            "until 20 s before the newest": {"until": str(oldest_s - 20)},
            "of a key with half": {"key": "k1"},
            "of a key with five": {"key": "rare"},
            "of an unknown key": {"key": "none"},
        }
        found = {name: _pages(client, parameters, pids) for name, parameters in cases.items()}
        by_id = [_timed(client, f"/v1/invocations/{middle['id']}", {})[0] for _ in range(_REPEATS)]
        return {**found, "one call by its id": {"first_ms": by_id, "calls": 1, "pages": 1, "slowest_ms": max(by_id)}}


def _pages(client: httpx.Client, parameters: dict[str, str], pids: tuple[int, ...]) -> dict[str, Any]:
    """Read the first page several times, then follow `next` until 500 calls or the end."""
    query = parameters | {"limit": str(_PAGE)}
    used = [measure.usage(pid)[pid].cpu_s for pid in pids]
    first = [_timed(client, "/v1/calls", query)[0] for _ in range(_REPEATS)]
    taken: list[float] = []
    ids: set[str] = set()
    following, pages, begun = "", 0, time.perf_counter()
    while pages < _MOST_PAGES and len(ids) < 10 * _PAGE:
        took, body = _timed(client, "/v1/calls", query | ({"before": following} if following else {}))
        taken.append(took)
        pages += 1
        ids |= {call["id"] for call in body["calls"]}
        if not (following := body.get("next") or ""):
            break
    return {
        "first_ms": first,
        "calls": len(ids),
        "pages": pages,
        "slowest_ms": max(taken),
        "all_s": round(time.perf_counter() - begun, 2),
        "is_complete": not following,
        "cpu_s": [round(measure.usage(pid)[pid].cpu_s - was, 2) for pid, was in zip(pids, used, strict=True)],
    }


def _timed(client: httpx.Client, path: str, query: dict[str, str]) -> tuple[float, Any]:
    since = time.perf_counter()
    answer = client.get(path, params=query)
    took = round((time.perf_counter() - since) * 1e3, 1)
    answer.raise_for_status()
    return took, answer.json()


def _gateway_mib(pid: int) -> float:
    return round(measure.usage(pid)[pid].rss_bytes / 2**20, 1)


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(status.split("VmHWM:")[1].split()[0]) / 1024, 1)


def _table(searches: dict[str, Any]) -> str:
    columns = ("search", "first page, ms", "slowest page, ms", "pages", "calls", "all pages, s", "CPU: gateway, bus, s")
    rows = [
        (
            name,
            f"{statistics.median(each['first_ms']):.0f}",
            f"{each['slowest_ms']:.0f}",
            each["pages"],
            each["calls"],
            each.get("all_s", ""),
            " + ".join(map(str, each.get("cpu_s", ()))),
        )
        for name, each in searches.items()
    ]
    return measure.table(columns, rows)


def _tables(result: dict[str, Any]) -> str:
    without, with_index = (_table(result[name]) for name in ("searches", "searches_with_index"))
    memory = f"{result['gateway_mib_before']} MiB before, {result['gateway_mib_after']} after, at most "
    return (
        f"{result['calls']:,} calls are stored; storing took {result['filled_s']} s of this run. Pages of {_PAGE}; the "
        f"search goes on until {10 * _PAGE} calls were found, or all were looked at.\n\n"
        + f"A gateway that has just started, and fills its index meanwhile:\n\n{without}\n"
        + f"After further {result['index_s']} s the index had all calls:\n\n{with_index}"
        + f"\nMemory of the gateway: {memory}{result['gateway_mib_peak']} MiB.\n"
    )


if __name__ == "__main__":
    main()
