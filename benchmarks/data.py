"""A volume on a second node against `cp`, and the throughput of a queue.

    python benchmarks/data.py [--rounds 3] [--megabytes 200] [--items 1000]

Two agents run on this machine. The second one has a declared GPU, so that it starts the workers. It fetches each
version of the volume from the bus's object store. `cp` copies the same file to the same disk, and syncs it, as an agent
does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

import measure
from gpufn import Client, Queue
from gpufn.data import channel
from gpufn.data.http_channel import HttpChannel

_APP = """\
from gpufn import Queue, Volume, gpu_function

FILES = Volume("bench")
ITEMS = Queue("inside")


def read() -> list[float]:
    return [FILES.version, FILES.path.joinpath("file.bin").stat().st_size]


@gpu_function
def drain(count: int) -> float:
    import time

    for number in range(count):
        ITEMS.put(number)
    start = time.perf_counter()
    for _ in range(count):
        with ITEMS.get(timeout=10):
            pass
    return time.perf_counter() - start
"""
_READER = """

@gpu_function(gpu="Bench", volumes=FILES, name="{0}")
def {0}() -> list[float]:
    return read()
"""
_GPU = {"uuid": "GPU-bench", "type": "gpu", "kind": "Bench", "memory_bytes": 1 << 34}
_CLIENTS = 8
_CASES = ("cp and sync", "put", "start on the second node", "start, with the files there")


def main() -> None:
    options = measure.arguments("Volumes and queues.", rounds=3, megabytes=200, items=1000)
    about, rounds, items = measure.machine(), int(options.rounds), int(options.items)
    size = int(options.megabytes) * 1_000_000
    with (
        measure.gpufn_up(GPUFN_NODE="one") as platform,
        tempfile.TemporaryDirectory() as folder,
        Client(platform.url) as client,
        httpx.Client(base_url=platform.url, timeout=300) as http,
    ):
        app, file = Path(folder) / "app.py", Path(folder) / "file.bin"
        app.write_text(_APP + "".join(_READER.format(name) for name in _readers(rounds)))
        times: dict[str, list[float]] = {name: [] for name in _CASES}
        with _second_node(platform, Path(folder) / "two"):
            for number in range(rounds):
                file.write_bytes(secrets.token_bytes(size))
                times["cp and sync"].append(_timed(lambda: _copy(file)))
                times["put"].append(_timed(lambda: client.put_files("bench", file)))
                if not number:
                    measure.deploy_file(platform, app, "--no-check")
                    _wait_for_nodes(http)
                for case, name in zip(_CASES[2:], ("first", "again"), strict=True):
                    times[case].append(_timed(functools.partial(_read, http, name, number, size)))
        rates = _queue_rates(client, http, items)
    result = {name: [round(each, 2) for each in seconds] for name, seconds in times.items()}
    headers = [f"{options.megabytes:g} MB, s", *(f"round {number + 1}" for number in range(rounds))]
    tables = measure.table(headers, [[name, *seconds] for name, seconds in result.items()])
    tables += "\n\n" + measure.table(["queue, items/s", "rate"], [[name, round(rate)] for name, rate in rates.items()])
    measure.write("data", {"seconds": result, "items_per_s": rates}, tables, about)


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _copy(file: Path) -> None:
    copy = file.with_name("copy.bin")
    subprocess.run(["cp", file, copy], check=True)
    subprocess.run(["sync", copy], check=True)
    copy.unlink()


def _readers(rounds: int) -> list[str]:
    """Return the functions that read the volume, each called once: each call is a cold start."""
    return [f"{name}{number}" for number in range(rounds) for name in ("first", "again")]


def _read(http: httpx.Client, name: str, number: int, size: int) -> None:
    answer = http.post(f"/v1/functions/{name}{number}/invoke", json={})
    answer.raise_for_status()
    assert answer.json() == [number + 1, size], answer.text


def _wait_for_nodes(http: httpx.Client) -> None:
    while len(http.get("/v1/nodes").json()["nodes"]) < 2:
        time.sleep(0.05)


@contextlib.contextmanager
def _second_node(platform: measure.Server, home: Path) -> Iterator[None]:
    first = Path(platform.environ["GPUFN_HOME"]) / "nats"
    home.mkdir()
    processes = []
    for role in ("agent", "runner"):
        password = json.loads((first / "credentials.json").read_bytes())[role]
        url = f"nats://{role}:{password}@127.0.0.1:{(first / 'port').read_text()}"
        environ = {"GPUFN_HOME": str(home), "GPUFN_NODE": "two", "GPUFN_NATS_URL": url, "GPUFN_GRACE": "1"}
        if role == "agent":
            environ["GPUFN_DEVICES"] = json.dumps([_GPU])
        with (home / f"{role}.log").open("wb") as log:
            command = [sys.executable, "-P", "-m", f"gpufn_runtime.{role}"]
            processes.append(subprocess.Popen(command, env=os.environ | environ, stdout=log, stderr=log))
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(30)


def _queue_rates(client: Client, http: httpx.Client, items: int) -> dict[str, float]:
    """Items per second of a client with one connection, of several at a time, and of one function."""
    channel.install(HttpChannel(client))
    queue = Queue("outside")

    def take(_: int) -> None:
        with queue.get(timeout=10):
            pass

    put_s = _timed(lambda: list(map(queue.put, range(items))))
    take_s = _timed(lambda: list(map(take, range(items))))
    with ThreadPoolExecutor(_CLIENTS) as threads:
        many_put_s = _timed(lambda: list(threads.map(queue.put, range(items))))
        many_take_s = _timed(lambda: list(threads.map(take, range(items))))
    answer = http.post("/v1/functions/drain/invoke", json={"count": items})
    answer.raise_for_status()
    return {
        "HTTP, put": items / put_s,
        "HTTP, take and acknowledge": items / take_s,
        f"HTTP, {_CLIENTS} threads, put": items / many_put_s,
        f"HTTP, {_CLIENTS} threads, take and acknowledge": items / many_take_s,
        "one function, take and acknowledge": items / answer.json(),
    }


if __name__ == "__main__":
    main()
