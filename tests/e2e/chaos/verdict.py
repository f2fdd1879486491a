"""Conditions that have to hold after the chaos. Each check waits for its condition, and reports what violates it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from gpufn_core.errors import PlatformError
from gpufn_core.home import Home
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import streams
from gpufn_platform.bus.storage.key_value import KeyValue
from tests.e2e.chaos.client import Call
from tests.e2e.chaos.faults import pids_inside
from tests.e2e.chaos.gateway import Gateway
from tests.e2e.chaos.ledger import read
from tests.e2e.chaos.receiver import Receiver

WITHIN_S = 90.0
FUNCTIONS = ("mark", "series", "nap")
_MOST_LETTERS = 1000  # limit of a list


def eventually(look: Callable[[], object], what: str, within_s: float = WITHIN_S, every_s: float = 0.25) -> None:
    """Wait until `look()` finds no violation. It may connect to the bus, and ask about each stream."""
    give_up = time.monotonic() + within_s
    while True:
        try:
            left = look()
        except (httpx.TransportError, PlatformError, KeyError, ValueError) as error:
            left = repr(error)
        if not left:
            return
        assert time.monotonic() < give_up, f"{what}: {left}"
        time.sleep(every_s)


def outcomes(clients: list[httpx.Client], calls: Iterable[Call]) -> dict[str, tuple[int, Any]]:
    """Return the outcome of each accepted call by its id.

    Raises AssertionError if gateways report different outcomes, or if a call does not end.
    """
    found = {}
    for call in calls:
        ends = [_result(client, call) for client in clients]
        assert all(end == ends[0] for end in ends), f"gateways report different outcomes {ends} of {call}"
        found[call.id] = ends[0]
    return found


def _result(client: httpx.Client, call: Call) -> tuple[int, Any]:
    give_up, last = time.monotonic() + WITHIN_S, "nothing"
    while time.monotonic() < give_up:
        try:
            answer = client.get(f"/v1/invocations/{call.id}/result?wait=10")
            last = f"{answer.status_code} {answer.text[:500]}"
            if answer.status_code == 404:
                break
            if answer.status_code == 200 or answer.json().get("code") not in (None, "bus_unavailable"):
                return answer.status_code, answer.json()
        except httpx.TransportError as error:
            last = repr(error)
        time.sleep(0.05)
    status = client.get(f"/v1/invocations/{call.id}").text
    raise AssertionError(f"the call has not ended: {last}\n{status}\n{call}")


def schedules(clients: Iterable[httpx.Client]) -> list[str]:
    """Return the ids of the schedules that are not over."""
    return [each["id"] for client in clients for each in client.get("/v1/schedules").json()["schedules"]]


def ended_again(client: httpx.Client, calls: Iterable[Call]) -> list[str]:
    """Return cancelled calls whose record has another end than the response to the cancellation."""
    cancelled = [call for call in calls if call.ended_at is not None]
    ends = [(call, client.get(f"/v1/invocations/{call.id}").json()["ended_at"]) for call in cancelled]
    return [f"{ended_at}: {call}" for call, ended_at in ends if ended_at != call.ended_at]


def unbuilt(clients: Iterable[httpx.Client]) -> list[str]:
    builds = [each for client in clients for each in client.get("/v1/builds?limit=1000").json()["builds"]]
    return [str(build) for build in builds if build["state"] != "succeeded"]


def wrong_webhooks(calls: Iterable[Call], ends: Mapping[str, tuple[int, Any]], receiver: Receiver) -> list[str]:
    """Return calls whose webhook has not received their end, or received a wrong one."""
    return [
        f"{deliveries} of {call}"
        for call in calls
        if call.has_webhook
        for deliveries in [receiver.deliveries[call.id]]
        if {each["state"] for each in deliveries} != {"succeeded" if ends[call.id][0] == 200 else "failed"}
        or len({each["ended_at"] for each in deliveries}) != 1
    ]


def wrong_dead_letters(clients: Iterable[httpx.Client], calls: Iterable[Call]) -> list[str]:
    """Return failed calls without a dead letter, and dead letters of calls that have not failed."""
    failed = {call.id for call in calls if call.fails == "always"}
    others = {call.id for call in calls} - failed
    wrong = []
    for client in clients:
        letters = client.get("/v1/dlq", params={"limit": _MOST_LETTERS}).json()["letters"]
        ids = {letter["id"] for letter in letters}
        wrong += [f"not dead: {each}" for each in ids & others]
        if len(letters) < _MOST_LETTERS:
            wrong += [f"no dead letter of {each}" for each in failed - ids]
    return wrong


def runs(path: Path) -> Counter[int]:
    """Return the number of starts by the number of the call."""
    return Counter(start.number for start in read(path))


def busy(clients: Iterable[httpx.Client]) -> list[str]:
    """Return the functions that have calls or workers."""
    views = [client.get(f"/v1/functions/{name}").json() for client in clients for name in FUNCTIONS]
    return [
        f"{view['name']}: queued {view['queued']}, running {view['running']}, {view['workers']}, {view['waiting']}"
        for view in views
        if view["queued"] != 0 or view["running"] != 0 or any(view["workers"].values())
    ]


class Stock:
    """The counts of all resources that the platform could leak, by name. An idle platform has constant counts."""

    def __init__(self, home: Path, bus_url: str, second: Gateway) -> None:
        self._home = home
        self._bus_url = bus_url
        self._second = second
        self._before: dict[str, int] = {}

    def take(self) -> None:
        """Take stock once the builder, the last process to start, has its consumer."""
        eventually(lambda: not self._now()[f"consumers of {subjects.BUILD}"], "the builder is not on the bus")
        self._before = self._now()

    def grown(self) -> list[str]:
        """Return the resources whose counts grew."""
        now = self._now()
        return [f"{name}: {count}, before {self._before.get(name, 0)}" for name, count in now.items()
                if count > self._before.get(name, 0)]  # fmt: skip

    def _now(self) -> dict[str, int]:
        home = Home(self._home)
        up = json.loads((self._home / "up.json").read_bytes())
        processes = {**up["pids"], "up": up["pid"], "second gateway": self._second.pid}
        known = set(processes.values())
        inside = [pid for pid in pids_inside(home.root, home.run) if pid not in known]
        return {
            "processes beside the platform's": len(inside),
            "worker folders": _entries(home.run / "w"),
            # A result whose caller is gone stays at its gateway for an hour.
            "folders of shared bodies": sum(1 for folder in home.shared_bodies.iterdir() if folder.name != "kept"),
            "shared bodies of workers": sum(
                1 for pattern in ("kept/*", "w-*/*") for _ in home.shared_bodies.glob(pattern)
            ),
            **{f"sockets of {name}": _sockets(pid) for name, pid in processes.items()},
            **asyncio.run(self._on_bus()),
        }

    async def _on_bus(self) -> dict[str, int]:
        bus = await Bus.connect(self._bus_url, name="stock")
        try:
            found: dict[str, int] = {}
            for depth in (await streams.depths(bus)).values():
                found["calls in queues"] = found.get("calls in queues", 0) + depth.total
            assignments = await KeyValue.open(bus, subjects.ASSIGNMENTS)
            found["assignments"] = len(await assignments.entries())
            for stream in (await bus.js("STREAM.NAMES"))["streams"]:
                found[f"consumers of {stream}"] = (await bus.js(f"STREAM.INFO.{stream}"))["state"]["consumer_count"]
            return found
        finally:
            await bus.close()


def _entries(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except FileNotFoundError:
        return 0


def _sockets(pid: int) -> int:
    """Count TCP sockets, and unix sockets that listen or are connected. Libraries leave unconnected unix sockets."""
    inodes = {os.readlink(entry)[8:-1] for entry in Path(f"/proc/{pid}/fd").glob("*") if entry.is_symlink()}
    tcp = [line.split()[9] for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    unix = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    used = [inode for _, _, _, flags, _, state, inode, *_ in unix if (flags, state) != ("00000000", "01")]
    return len(inodes.intersection(tcp + used))
