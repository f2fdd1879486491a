"""Maps: acceptance rate, time to the first result, memory, and the duration of short maps.

    python benchmarks/maps.py [--items 100000] [--rounds 3]

accepted   items of `held` per second, whose only worker is busy, until the last chunk was accepted
whole      a map of `noop`: the first result, all results, and the memory of each process before and at its peak
short      `noop` over a few items, as a stored map and as the same number of single calls
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import measure
from functions.noop import held, noop
from gpufn import Client, Map
from gpufn.call import transport as _transport
from gpufn.client.http_transport import HttpTransport
from gpufn.maps import local_map
from gpufn_core.errors import MapNotFound
from gpufn_core.ids import new_map_id

_SHORT = (1, 2, 4, 8, 16, 64, 256)
_LOOK_EACH = 2_000  # results between two memory samples
_LONG_S = 100_000
_PAUSE_S = 0.02


def main() -> None:
    options = measure.arguments("Maps.", items=100_000, rounds=3)
    about = measure.machine()
    with measure.gpufn_up() as platform, _client(platform):
        measure.deploy(platform, "noop")
        assert noop.remote(1) == 1
        held.spawn(_LONG_S)
        accepted = [_accepted(options.items) for _ in range(options.rounds)]
        whole = [_whole(platform, options.items) for _ in range(options.rounds)]
        short = {str(count): _short(count, options.rounds) for count in _SHORT}
    result = {"items": options.items, "accepted_per_s": accepted, "whole": whole, "short_ms": short}
    measure.write("maps", result, _tables(result), about)


@contextlib.contextmanager
def _client(platform: measure.Server) -> Iterator[None]:
    with contextlib.closing(HttpTransport(lambda: Client(platform.url))) as transport:
        _transport.install(transport)
        yield
        _transport.install(None)


def _accepted(count: int) -> float:
    start = time.perf_counter()
    items = held.map(range(count), window=count + 1)
    with Client(_url()) as client:
        while _is_open(client, items):
            time.sleep(_PAUSE_S)
        return round(count / (time.perf_counter() - start))


def _is_open(client: Client, items: Map[int]) -> bool:
    assert items.id is not None
    try:
        return client.map(items.id).state == "open"
    except MapNotFound:  # not created yet
        return True


def _whole(platform: measure.Server, count: int) -> dict[str, Any]:
    before = _resident(platform)
    largest = dict(before)
    start = time.perf_counter()
    results: Map[int] = noop.map(range(count))
    assert next(results) == 0
    first_s = time.perf_counter() - start
    for number, value in enumerate(results, 1):
        assert value == number
        if number % _LOOK_EACH == 0:
            for name, mib in _resident(platform).items():
                largest[name] = max(largest.get(name, 0.0), mib)
    took_s = time.perf_counter() - start
    return {"first_s": round(first_s, 3), "items_per_s": round(count / took_s), "mib": before, "largest_mib": largest}


def _short(count: int, rounds: int) -> dict[str, float]:
    def calls() -> Iterator[Any]:
        arguments = ((number,) for number in range(count))
        return local_map.results(
            noop.remote, arguments, name="noop", window=local_map.AT_A_TIME, ordered=True, return_exceptions=False
        )

    def kept() -> Map[int]:
        return noop.map(range(count), id=new_map_id())

    return {"kept": _milliseconds(kept, rounds), "calls": _milliseconds(calls, rounds)}


def _milliseconds(begin: Callable[[], Iterator[Any]], rounds: int) -> float:
    """Return the median, after one discarded run."""
    samples = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in begin():
            pass
        samples.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(samples[1:]), 1)


def _resident(platform: measure.Server) -> dict[str, float]:
    """Return MiB by process, with this one as the client."""
    mib_by_name: dict[str, float] = defaultdict(float)
    for each in measure.usage(platform.process.pid).values():
        mib_by_name[each.name] += each.rss_bytes / 2**20
    mib_by_name["client"] = measure.usage(os.getpid())[os.getpid()].rss_bytes / 2**20
    return {name: round(mib, 1) for name, mib in mib_by_name.items()}


def _url() -> str:
    transport = _transport.current()
    assert isinstance(transport, HttpTransport)
    return transport.client.url


def _tables(result: dict[str, Any]) -> str:
    whole = result["whole"]
    accepted = ", ".join(f"{rate:,}" for rate in result["accepted_per_s"])
    firsts = ", ".join(f"{each['first_s']:.2f}" for each in whole)
    rates = ", ".join(f"{each['items_per_s']:,}" for each in whole)
    rows = [
        [f"{result['items']:,} items accepted, per second", accepted],
        [f"first result of {result['items']:,}, s", firsts],
        ["results per second, no-ops", rates],
    ]
    names = sorted(set(itertools.chain.from_iterable(each["largest_mib"] for each in whole)))
    memory = [
        [name, *(f"{each['mib'].get(name, 0):.0f} → {each['largest_mib'].get(name, 0):.0f}" for each in whole)]
        for name in names
    ]
    short = [[count, each["kept"], each["calls"]] for count, each in result["short_ms"].items()]
    rounds = [f"round {number}" for number in range(1, len(whole) + 1)]
    return "\n".join(
        [
            measure.table(["", "in each round"], rows),
            measure.table(["resident MiB, before and at most", *rounds], memory),
            measure.table(["items of a short map", "stored map, ms", "single calls, ms"], short),
        ]
    )


if __name__ == "__main__":
    main()
