"""Task queues that durable calls are compared with: a worker of one process each, and the server that it uses.

Each queue is benchmarks/peers/`name`_queue.py, run by the interpreter that has it. `work` runs its worker; `run CALLS`
submits from a client of its own, straight to the server, without a gateway in between.
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
    """A server that stores queues. `kept` describes how it stores an accepted call."""

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
        """Return the seconds until all calls are submitted and until all results are stored, and the CPU seconds of all
        processes.

        Raises subprocess.SubprocessError if the run fails or does not finish in time.
        """
        before = self._cpu_s()
        command = [self.python, str(self.script), "run", str(calls)]
        environ = os.environ | self.store.environ
        completed = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=_RUN_S)
        report: dict[str, float] = json.loads(completed.stdout.strip().splitlines()[-1])
        return report | {"cpu_s": report["cpu_s"] + self._cpu_s() - before}

    def _cpu_s(self) -> float:
        used = measure.usage(self.worker.process.pid) | measure.usage(self.store.pid)
        return sum(each.cpu_s for each in used.values())


@contextlib.contextmanager
def redis(*, log: bool) -> Iterator[Store]:
    """Run a Redis server, in memory only or with its append-only log on disk."""
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
    """Yield the queue once its worker has done a call."""
    script = _PEERS / f"{name}_queue.py"
    environ = os.environ | store.environ
    with measure.running(name, [python, str(script), "work"], environ, signal.SIGTERM) as process:
        # If taskiq's client loses a paused server, its pull does not resume; it does not poll either.
        worker = measure.Server(name, "", process, environ, can_pause=name != "taskiq")
        queue = TaskQueue(name, python, script, store, worker)
        queue.run(100)
        yield queue


def available(python: str) -> list[str]:
    """Return the installed queues, and print the others."""
    names = []
    needs = {"celery": ("celery", "redis"), "dramatiq": ("dramatiq", "redis"), "taskiq": ("taskiq_nats",)}
    for name, modules in needs.items():
        missing = [module for module in modules if not measure.has(python, module)]
        if "redis" in modules and shutil.which("redis-server") is None:
            missing.append("redis-server")
        if missing:
            print(f"skipped {name}: {', '.join(missing)} is not installed (see README.md)", file=sys.stderr)
        else:
            names.append(name)
    return names


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_port(port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nothing listens on port {port}")
