"""Fixtures that several folders share: a real nats-server and a real platform. Also the order of the tests.

A test whose prerequisite is missing on this machine is skipped, and fails where CI=true.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
import hypothesis
import pytest

from gpufn_core.errors import BusUnavailable
from gpufn_core.home import Home
from gpufn_local.nats_process import EmbeddedServer
from tests.forked_commands import ForkedCommands
from tests.waiting import until

ROOT = Path(__file__).parent.parent
# Fast folders run first, so that a wrong table of decisions fails before any process starts. Long files run first among
# the tests that start processes, so that several pytest workers end at about the same time.
_ORDER = (
    "repo",
    "core",
    "sdk",
    "gateway",
    "runtime",
    "builder",
    "platform",
    "local",
    "benchmarks",
    "conformance",
    "examples",
    "e2e",
    "gpu",
)
# The e2e files that take half a minute and more on a busy machine, the longest first: a late start of one would keep
# the other pytest workers waiting.
_LONG = (
    "test_console.py",
    "test_chaos.py",
    "test_builds.py",
    "test_large_bodies.py",
    "test_survival.py",
    "test_cluster.py",
    "test_two_gateways.py",
    "test_models.py",
    "test_sandbox.py",
    "test_durable.py",
    "test_notebook.py",
    "test_exec.py",
    "test_rollout.py",
    "test_bad_input.py",
    "test_disk_full.py",
    "test_long_work.py",
    "test_down.py",
    "test_hostile.py",
    "test_drain.py",
    "test_gangs.py",
    "test_power_failure.py",
    "test_parking.py",
    "test_secrets.py",
    "test_data.py",
)
# Engines are measured for milliseconds. A test that fails leaves calls that sleep, and clients leave streams open.
QUICK: Mapping[str, str] = {"GPUFN_BUILD_MEASURE": "0.03", "GPUFN_GRACE": "2", "GPUFN_SHUTDOWN_TIMEOUT_S": "2"}
_commands = ForkedCommands()
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0


def missing(what: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what}; CI installs what it needs")
    pytest.skip(what)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock on the file, which ends with the process."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def pytest_addoption(parser: pytest.Parser) -> None:
    chaos = parser.getgroup("gpufn")
    chaos.addoption("--chaos-seconds", type=float, default=6.0, help="How long processes are killed and stopped.")
    chaos.addoption("--full", action="store_true", help="Also cause each fault that an alert reports: five minutes.")
    chaos.addoption("--chaos-seed", default="1", help="Seed of the faults: a number, or `random`.")


def pytest_configure() -> None:
    """Load a hypothesis profile without time limits, because a busy machine makes examples slow."""
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("busy", hypothesis.settings(), deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("busy")


def pytest_collection() -> None:
    """Collect ten thousand tests without the garbage collector, which would look at all of them again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    _commands.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # all processes of a run must collect the same names, and gzip stores the time
        assert r"\x1f\x8b" not in item.nodeid, f"give the parameters of {item.nodeid} an id: they have gzip data"

    def rank(item: pytest.Item) -> tuple[bool, int, int]:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        return item.get_closest_marker("e2e") is not None, _place(folder, _ORDER), _place(item.path.name, _LONG)

    items.sort(key=rank)


def _place(name: str, order: Sequence[str]) -> int:
    return order.index(name) if name in order else len(order)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign whole files to pytest workers, in our order; one worker runs all tests that share a Docker daemon."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            folder, _, file = super()._split_scope(nodeid).rpartition("/")
            return folder if folder.endswith("/docker") else f"{folder}/{file}"

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="session", autouse=True)
def _run_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary folder for the run folders of homes whose paths are too long for sockets.

    Workers may write to the folders of the tests, because tests read there what a worker has done.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gpufn-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as environ,
    ):
        environ.setenv("XDG_RUNTIME_DIR", folder)
        environ.setenv("GPUFN_SANDBOX_FOLDERS", f"{tmp_path_factory.getbasetemp()}:rw")
        yield


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A nats-server with an empty store."""
    try:
        server = EmbeddedServer.start(tmp_path_factory.mktemp("nats"))
    except BusUnavailable as error:
        missing(error.message)
    with server:
        yield server


@dataclass(frozen=True)
class Platform:
    """A running `gpufn up`, and the ways in which users reach it."""

    url: str
    home: Path
    client: httpx.Client
    process: subprocess.Popen[bytes]

    def gpufn(self, *arguments: str | Path) -> str:
        """Return the output of a gpufn command. If the command fails, the test fails with all of its output."""
        ended = self.try_gpufn(*arguments)
        assert ended.returncode == 0, f"gpufn {' '.join(map(str, arguments))}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def try_gpufn(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"GPUFN_URL": self.url, "GPUFN_HOME": str(self.home)}
        return _commands.run(arguments, environ, timeout_s=120)

    def post(self, function: str, body: Any = None, *, headers: dict[str, str] | None = None) -> httpx.Response:
        """Invoke a function with a JSON object, or with raw bytes."""
        content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body or {}}
        return self.client.post(f"/v1/functions/{function}/invoke", headers=headers, **content)

    def invoke(self, function: str, body: Any = None) -> Any:
        """Return the JSON result of a call that succeeds."""
        answer = self.post(function, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ready_workers(self, function: str) -> int:
        workers: dict[str, int] = self.client.get(f"/v1/functions/{function}").json()["workers"]
        return workers["ready"]


def http_client(url: str = "", *, timeout_s: float = 60.0) -> httpx.Client:
    """An HTTP client without certificates: plain HTTP needs none, and loading them takes 35 ms."""
    return httpx.Client(base_url=url, timeout=timeout_s, verify=False)


@contextlib.contextmanager
def running_platform(
    home: Path, *options: str, environ: Mapping[str, str] = {}, wrapper: Sequence[str] = ()
) -> Iterator[Platform]:
    """Run `gpufn up` on a free port with QUICK settings, and stop it at the end. `wrapper` is a command prefix."""
    home.mkdir(parents=True, exist_ok=True)
    log = home / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "gpufn", "up", "--port", "0", *options],
            env=os.environ | {"GPUFN_HOME": str(home), "PATH": _path(), **QUICK, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        url = _wait_until_ready(Home(home), process, log)
        with http_client(url) as client:
            yield Platform(url, home, client, process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def _path() -> str:
    """Return PATH without pyenv's stand-ins: shell scripts that take an agent 0.2 s to ask for their versions."""
    return os.pathsep.join(
        folder for folder in os.environ["PATH"].split(os.pathsep) if not folder.endswith("/.pyenv/shims")
    )


@pytest.fixture(scope="session")
def _shared_platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with running_platform(tmp_path_factory.mktemp("home")) as platform:
        yield platform


@pytest.fixture(scope="module")
def platform(_shared_platform: Platform) -> Iterator[Platform]:
    """The platform that many files share. Each test deploys its own functions, and leaves all processes running.

    A test that kills one waits until calls succeed again. The functions of a file are deleted after it: another file
    may use their names, and needs the room.
    """
    yield _shared_platform
    client = _shared_platform.client
    until(lambda: _shared_platform.process.poll() is not None or _serves(client), "the platform serves calls again")
    for function in client.get("/v1/functions").json()["functions"]:
        client.delete(f"/v1/functions/{function['name']}")


def _serves(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _wait_until_ready(home: Home, process: subprocess.Popen[bytes], log: Path) -> str:
    give_up = time.monotonic() + _START_TIMEOUT_S
    with http_client(timeout_s=5) as client:
        while time.monotonic() < give_up and process.poll() is None:
            try:
                url: str = json.loads(home.up_file.read_bytes())["url"]
                if client.get(f"{url}/readyz").status_code == 200:
                    return url
            except (FileNotFoundError, json.JSONDecodeError, httpx.TransportError):
                pass
            time.sleep(0.05)
    pytest.fail(f"the platform did not get ready (exit code {process.poll()}):\n{log.read_text(errors='replace')}")
