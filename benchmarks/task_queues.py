"""Task queues beside which durable calls are measured: a worker of one process each, and the server that it uses.

Each is benchmarks/peers/`name`_queue.py, run by the interpreter that has it: `work` is its worker, `run CALLS` submits
from a client of its own, straight to the server, without a gateway in between.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import measure
from gpufn_local.nats_process import EmbeddedServer

_START_S = 60.0
_RUN_S = 120.0
_PEERS = measure.HERE / "peers"


@dataclass(frozen=True)
class Store:
    """A server that queues are kept on. `kept`: what of an accepted call is where, in words."""

    name: str
    environ: dict[str, str]
    pid: int
    kept: str


@dataclass(frozen=True)
class TaskQueue:
    name: str
    python: str
    script: Path
    store: Store
    worker: measure.Server

    def run(self, calls: int) -> dict[str, float]:
        """Seconds until all are submitted, until all results are stored; and CPU seconds of all processes.

        Raises subprocess.SubprocessError when it did not come to an end.
        """
        before = self._cpu_s()
        command = [self.python, str(self.script), "run", str(calls)]
        environ = os.environ | self.store.environ
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=_RUN_S)
        told: dict[str, float] = json.loads(ended.stdout.strip().splitlines()[-1])
        return told | {"cpu_s": told["cpu_s"] + self._cpu_s() - before}

    def _cpu_s(self) -> float:
        used = measure.usage(self.worker.process.pid) | measure.usage(self.store.pid)
        return sum(each.cpu_s for each in used.values())


@contextlib.contextmanager
def redis(*, log: bool) -> Iterator[Store]:
    """A Redis server of our own, in memory alone or with its log on disk."""
    with tempfile.TemporaryDirectory(prefix="gpufn-bench-") as folder:
        port = _free_port()
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "everysec"] if log else ["--appendonly", "no"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            _await_port(port)
            name = "Redis with its log" if log else "Redis in memory"
            kept = "written to a log, synced each second" if log else "in memory only: gone with the server"
            yield Store(name, {"REDIS": f"redis://127.0.0.1:{port}"}, process.pid, kept)
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def nats() -> Iterator[Store]:
    with tempfile.TemporaryDirectory(prefix="gpufn-bench-") as folder, EmbeddedServer.start(Path(folder)) as server:
        yield Store("NATS", {"NATS": server.url}, server.pid, "written to a file, synced every two minutes")


@contextlib.contextmanager
def task_queue(name: str, python: str, store: Store) -> Iterator[TaskQueue]:
    """Once its worker has done a call."""
    script = _PEERS / f"{name}_queue.py"
    environ = os.environ | store.environ
    with measure.running(name, [python, str(script), "work"], environ, signal.SIGTERM) as process:
        # taskiq's client loses a server that it does not answer, and its pull does not come back; it does not poll.
        worker = measure.Server(name, "", process, environ, can_pause=name != "taskiq")
        queue = TaskQueue(name, python, script, store, worker)
        queue.run(100)
        yield queue


def available(python: str) -> list[str]:
    """Those that are installed; the others are named."""
    found = []
    needs = {"celery": ("celery", "redis"), "dramatiq": ("dramatiq", "redis"), "taskiq": ("taskiq_nats",)}
    for name, modules in needs.items():
        missing = [module for module in modules if not measure.has(python, module)]
        if "redis" in modules and shutil.which("redis-server") is None:
            missing.append("redis-server")
        if missing:
            print(f"{name} is left out: {', '.join(missing)} is not installed (see README.md)", file=sys.stderr)
        else:
            found.append(name)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_port(port: int) -> None:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nothing listens on port {port}")
