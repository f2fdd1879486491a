"""What has to hold when the chaos is over. Each check waits for its condition, and says what is in its way."""

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
_MOST_LETTERS = 1000  # that are listed


def eventually(look: Callable[[], object], what: str, within_s: float = WITHIN_S, every_s: float = 0.1) -> None:
    """Until `look()` finds nothing that is in the way."""
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
    """How each accepted call ended, as every gateway tells it; raises AssertionError when they differ, or for one that
    does not end."""
    found = {}
    for call in calls:
        ends = [_result(client, call) for client in clients]
        assert all(end == ends[0] for end in ends), f"one outcome each, not {ends} of {call}"
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
    raise AssertionError(f"it has not ended: {last}\n{status}\n{call}")


def schedules(clients: Iterable[httpx.Client]) -> list[str]:
    """Those that are not over."""
    return [each["id"] for client in clients for each in client.get("/v1/schedules").json()["schedules"]]


def ended_again(client: httpx.Client, calls: Iterable[Call]) -> list[str]:
    """Cancelled calls whose first end did not hold."""
    told = [call for call in calls if call.ended_at is not None]
    ends = [(call, client.get(f"/v1/invocations/{call.id}").json()["ended_at"]) for call in told]
    return [f"{ended_at}: {call}" for call, ended_at in ends if ended_at != call.ended_at]


def unbuilt(clients: Iterable[httpx.Client]) -> list[str]:
    builds = [each for client in clients for each in client.get("/v1/builds?limit=1000").json()["builds"]]
    return [str(build) for build in builds if build["state"] != "succeeded"]


def untold(calls: Iterable[Call], ends: Mapping[str, tuple[int, Any]], receiver: Receiver) -> list[str]:
    """Calls whose ends their webhook has not heard, or not as they were."""
    return [
        f"{letters} of {call}"
        for call in calls
        if call.is_told
        for letters in [receiver.heard[call.id]]
        if {letter["state"] for letter in letters} != {"succeeded" if ends[call.id][0] == 200 else "failed"}
        or len({letter["ended_at"] for letter in letters}) != 1
    ]


def misburied(clients: Iterable[httpx.Client], calls: Iterable[Call]) -> list[str]:
    """Failed calls without a dead letter, and letters of calls that have not failed."""
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
    """How often each number was started."""
    return Counter(start.number for start in read(path))


def busy(clients: Iterable[httpx.Client]) -> list[str]:
    """Functions that have calls, or workers."""
    views = [client.get(f"/v1/functions/{name}").json() for client in clients for name in FUNCTIONS]
    return [
        f"{view['name']}: queued {view['queued']}, running {view['running']}, {view['workers']}, {view['waiting']}"
        for view in views
        if view["queued"] != 0 or view["running"] != 0 or any(view["workers"].values())
    ]


class Stock:
    """What the platform has of everything that could leak, by name; with nothing to do it is always the same."""

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
        """What there is more of than before."""
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
            # A result that came to a gateway for nobody stays there for an hour.
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
    """Of TCP, and of unix those that listen or are connected: one that never was is garbage of some library's."""
    inodes = {os.readlink(entry)[8:-1] for entry in Path(f"/proc/{pid}/fd").glob("*") if entry.is_symlink()}
    tcp = [line.split()[9] for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    unix = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    used = [inode for _, _, _, flags, _, state, inode, *_ in unix if (flags, state) != ("00000000", "01")]
    return len(inodes.intersection(tcp + used))
