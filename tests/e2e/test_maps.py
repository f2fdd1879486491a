"""Maps on a platform: ordered, bounded, and each item runs once after kill -9 of any process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpufn import Client, FunctionRaised, InvocationEnded, Map
from gpufn.call import transport as _transport
from gpufn.client.http_transport import HttpTransport
from tests.conftest import ROOT, Platform
from tests.e2e.apps.mapped import choosy, large, noted, slow, upto
from tests.e2e.test_survival import pids_of

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "mapped.py"


@pytest.fixture(scope="module")
def own(platform: Platform) -> Iterator[Platform]:
    platform.gpufn("deploy", APP)
    transport = HttpTransport(lambda: Client(platform.url))
    _transport.install(transport)
    yield platform
    _transport.install(None)
    transport.close()


def runs_of(path: Path) -> Counter[int]:
    return Counter(int(line) for line in path.read_text().split())


def test_results_arrive_in_order_or_as_they_end(own: Platform) -> None:
    wanted = [number for number in range(1200) if number % 10 != 3]
    assert list(choosy.map(wanted)) == wanted
    assert sorted(choosy.map(wanted, ordered=False)) == wanted


def test_an_endless_source_is_taken_from_as_results_are_read(own: Platform, tmp_path: Path) -> None:
    path, taken = str(tmp_path / "runs"), 0

    def numbers() -> Iterator[tuple[str, int]]:
        nonlocal taken
        for taken in itertools.count(1):
            yield path, taken - 1

    with noted.starmap(numbers(), window=100) as results:
        for place, value in zip(range(500), results, strict=False):
            assert value == place
            assert taken <= place + 1 + 100
    assert len(runs_of(tmp_path / "runs")) <= 600


def test_each_failure_is_its_items_own(own: Platform) -> None:
    results = list(choosy.map(range(30), return_exceptions=True))
    assert [place for place, result in enumerate(results) if isinstance(result, FunctionRaised)] == [3, 13, 23]
    failing = choosy.map(range(30))
    assert [next(failing) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(FunctionRaised, match="3 is not liked") as caught:
        next(failing)
    assert "in choosy" in caught.value.__notes__[0]


def test_asyncio_maps_an_asynchronous_source(own: Platform) -> None:
    async def numbers() -> AsyncIterator[int]:
        for number in range(100, 200):
            if number % 10 != 3:
                yield number

    async def main() -> list[int]:
        return [value async for value in choosy.aio.starmap((number,) async for number in numbers())]

    assert asyncio.run(main()) == [number for number in range(100, 200) if number % 10 != 3]


def test_a_generators_result_is_its_items(own: Platform) -> None:
    assert list(upto.map(range(12))) == [list(range(number)) for number in range(12)]


def test_a_large_result_arrives_like_the_others(own: Platform) -> None:
    assert [len(value) for value in large.map(range(20))] == [10, 2 << 20] * 10


def test_a_cancelled_map_ends_its_remaining_items(own: Platform) -> None:
    results = slow.map(range(50))
    assert next(results) == 0
    assert results.cancel()
    assert results.id is not None
    found = Map.from_id(results.id, return_exceptions=True)
    assert next(found) == 0
    assert all(isinstance(value, InvocationEnded) for value in found)
    with Client(own.url) as client:
        view = client.map(results.id)
        assert (view.state, view.accepted, view.ended) == ("cancelled", 50, 50)


def test_a_client_continues_the_map_of_a_killed_client_without_loss_or_repeats(own: Platform, tmp_path: Path) -> None:
    path = tmp_path / "runs"
    client = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.apps.mapping", path],
        cwd=ROOT,
        env=os.environ | {"GPUFN_URL": own.url},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    map_id = client.stdout.readline().strip()
    seen = [line.split() for line in itertools.islice(client.stdout, 500)]
    client.kill()
    client.wait()
    client.stdout.close()
    values = [int(value) for _, value in seen]
    assert values == list(range(500))

    # The client maps the same items, and does not send the accepted ones again.
    rest = noted.starmap(((str(path), number) for number in range(1500)), id=map_id, after=seen[-1][0])
    assert [*values, *rest] == list(range(1500))
    assert runs_of(path) == Counter(range(1500))
    assert [*Map.from_id(map_id, after=rest.cursor)] == []
    assert [*Map.from_id(map_id)] == list(range(1500))


@pytest.mark.parametrize("victim", ["gateway", "nats"])
def test_a_map_continues_after_kill_9_of_a_process(own: Platform, tmp_path: Path, victim: str) -> None:
    path = tmp_path / "runs"
    values = []
    for value in noted.starmap(((str(path), number) for number in range(1500)), window=500):
        values.append(value)
        if value == 500:
            os.kill(pids_of(own, victim)[0], signal.SIGKILL)
    assert values == list(range(1500))
    runs = runs_of(path)
    assert set(runs) == set(range(1500))
    assert victim == "nats" or set(runs.values()) == {1}  # calls that ran when the bus died may run again


def test_the_command_maps_lines_and_reports_failed_items(own: Platform, tmp_path: Path) -> None:
    (lines := tmp_path / "lines.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in (1, 2, 3, 4)))
    ended = own.try_gpufn("map", "choosy", "-d", f"@{lines}")
    assert (ended.returncode, ended.stdout.split()) == (7, ["1", "2", "4"])
    assert "item 2: ValueError: 3 is not liked" in ended.stderr
    shown = [
        json.loads(line) for line in own.try_gpufn("map", "choosy", "-d", f"@{lines}", "--json").stdout.splitlines()
    ]
    assert [each.get("result") for each in shown] == [1, 2, None, 4]
    assert shown[2]["error"]["code"] == "function_raised"
    newest = json.loads(own.gpufn("calls", "choosy", "--json", "-n", "1"))[0]
    assert (newest["accepted"], newest["ended"], newest["state"]) == (4, 4, "ended")
    assert "4 of 4 have ended" in own.gpufn("status", newest["id"])
    assert "had already ended" in own.gpufn("cancel", newest["id"])
