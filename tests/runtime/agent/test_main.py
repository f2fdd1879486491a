"""`python -m gpufn_runtime.agent` with the real worker."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from gpufn_core.protocol import subjects
from gpufn_local.nats_process import find_binary
from gpufn_platform.bus.storage import object_store
from gpufn_platform.process.settings import EXIT_CONFIGURATION

ROOT = Path(__file__).parents[3]


def start(node: Any, url: str, log: Path, **settings: str) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "gpufn_runtime.agent"],
            env={
                **{name: os.environ[name] for name in ("PATH", "XDG_RUNTIME_DIR")},
                "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("sdk", "runtime")),
                "GPUFN_NODE": node.name,
                "GPUFN_NATS_URL": url,
                "GPUFN_HOME": str(node.home.root),
                **settings,
            },
            stdout=output,
            stderr=output,
        )


async def wait(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 15)


def is_alive(pid: int) -> bool:
    descriptor = os.pidfd_open(pid)
    try:
        return not select.select([descriptor], [], [], 0)[0]
    finally:
        os.close(descriptor)


async def deploy(node: Any, **options: Any) -> None:
    revision = await node.deploy(files={"app.py": "def hello():\n    return 1\n"}, **options)
    await object_store.ensure_bucket(node.bus, subjects.BUNDLES)
    await object_store.put(node.bus, subjects.BUNDLES, node.bundles[revision.bundle])
    await node.use_the_platforms_buckets()
    await node.revisions.put(subjects.revision_key(node.function, 1), msgspec.msgpack.encode(revision))
    await node.activate(1)


async def listen(node: Any, worker: str) -> asyncio.Server:
    """Fake runner: accepts the worker's connection and sends nothing."""
    path = node.home.worker_socket(worker)
    path.parent.mkdir(parents=True, exist_ok=True)
    connected = asyncio.Event()
    node.connected[worker] = connected

    async def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read(-1)
        writer.close()

    return await asyncio.start_unix_server(on_connect, path)


def test_the_real_worker_is_started_outlives_a_killed_agent_and_ends_with_the_next(
    on_node: Any, nats: Any, tmp_path: Path
) -> None:
    log = tmp_path / "agent.log"

    async def run(node: Any) -> None:
        await deploy(node)
        agent = start(node, nats.url_for("agent"), log)
        servers = []
        try:
            await node.until(lambda: any("" in r.templates for r in node.reports))
            worker = "w-real00000000"
            servers.append(await listen(node, worker))
            await node.assign(worker)
            event = await node.event(worker, "started")
            assert event.cold_start.standby is True
            async with asyncio.timeout(30):
                await node.connected[worker].wait()
            pid = await node.pid(worker)
            agent.kill()
            await wait(agent)
            assert is_alive(pid)
            died_at = time.time()  # the last report of the killed agent may arrive later
            agent = start(node, nats.url_for("agent"), log, GPUFN_TEMPLATES="0", GPUFN_GRACE="3")
            report = await node.until(lambda: [r for r in node.reports if r.processes and r.sent_at > died_at])
            assert [(p.worker, p.pid) for p in report[0].processes] == [(worker, pid)]
            agent.send_signal(signal.SIGTERM)
            assert await wait(agent) == 0
            event = await node.event(worker, "exited")
            assert await node.assigned() == []
            assert not list(node.home.worker("x").parent.iterdir())
        finally:
            agent.kill()
            await wait(agent)
            for server in servers:
                server.close()
            print(log.read_text())

    on_node(run)


def test_a_cold_start_of_the_real_worker(on_node: Any, nats: Any, tmp_path: Path) -> None:
    log = tmp_path / "agent.log"

    async def run(node: Any) -> None:
        await deploy(node)
        agent = start(node, nats.url_for("agent"), log, GPUFN_TEMPLATES="0", GPUFN_GRACE="1")
        try:
            await node.until(lambda: node.reports)
            server = await listen(node, "w-cold00000000")
            began = time.monotonic()
            await node.assign("w-cold00000000")
            async with asyncio.timeout(30):
                await node.connected["w-cold00000000"].wait()
            print(f"cold: connected after {time.monotonic() - began:.3f} s")
            server.close()
        finally:
            agent.terminate()
            await wait(agent)
            print(log.read_text())
        assert await node.assigned() == []

    on_node(run)


def test_a_second_agent_of_one_home_is_refused(on_node: Any, nats: Any, tmp_path: Path) -> None:
    async def run(node: Any) -> None:
        first = start(node, nats.url, tmp_path / "first.log")
        try:
            await node.until(lambda: node.reports)
            second = start(node, nats.url, tmp_path / "second.log")
            assert await wait(second) == EXIT_CONFIGURATION
            assert "Another agent" in (tmp_path / "second.log").read_text()
        finally:
            first.terminate()
            await wait(first)

    on_node(run)


def test_a_second_agent_of_one_node_is_refused_with_the_location_of_the_first(
    on_node: Any, nats: Any, tmp_path: Path
) -> None:
    async def run(node: Any) -> None:
        first = start(node, nats.url_for("agent"), tmp_path / "first.log")
        try:
            await node.until(lambda: node.reports)
            elsewhere = {"GPUFN_HOME": str(tmp_path / "elsewhere")}
            second = start(node, nats.url_for("agent"), tmp_path / "second.log", **elsewhere)
            assert await wait(second) == EXIT_CONFIGURATION
            told = (tmp_path / "second.log").read_text()
            assert f" node {node.name}, on " in told
            assert f"GPUFN_HOME={node.home.root}, process {first.pid}: stop it" in told
            first.kill()
            await wait(first)
            died_at = time.time()
            third = start(node, nats.url_for("agent"), tmp_path / "third.log", **elsewhere)
            await node.until(lambda: [r for r in node.reports if r.sent_at > died_at])
            third.terminate()
            assert await wait(third) == 0
        finally:
            first.kill()
            await wait(first)

    on_node(run)


def test_a_missing_setting_is_reported_in_one_line(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "gpufn_runtime.agent"],
        env={"PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("sdk", "runtime"))},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == EXIT_CONFIGURATION
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("GPUFN_NATS_URL ")


def test_a_bus_that_stores_nothing_is_reported_in_one_line(tmp_path: Path) -> None:
    bus = subprocess.Popen(
        [find_binary(), "-a", "127.0.0.1", "-p", "-1", "--ports_file_dir", tmp_path], stderr=subprocess.DEVNULL
    )
    try:
        while not (ports := [file for file in tmp_path.glob("*.ports") if file.stat().st_size]):
            assert bus.poll() is None
        ended = subprocess.run(
            [sys.executable, "-m", "gpufn_runtime.agent"],
            env={
                **{name: os.environ[name] for name in ("PATH", "XDG_RUNTIME_DIR")},
                "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("sdk", "runtime")),
                "GPUFN_NATS_URL": json.loads(ports[0].read_bytes())["nats"][0],
                "GPUFN_HOME": str(tmp_path / "home"),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        bus.kill()
        bus.wait()
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "ERROR agent gpufn_runtime.agent: No subscriber on $JS.API" in ended.stderr.splitlines()[-1]


def test_the_power_limit_of_the_setting_holds_while_the_agent_runs(on_node: Any, nats: Any, tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from tests.runtime.agent.devices.fake_nvml import FakeGpu, FakeNvml\n"
        "sys.modules['pynvml'] = FakeNvml(FakeGpu('GPU-0'))\n"
    )
    path = os.pathsep.join(str(folder) for folder in (tmp_path, ROOT, ROOT / "sdk", ROOT / "runtime"))

    async def run(node: Any) -> None:
        await node.use_the_platforms_buckets()
        settings = {"PYTHONPATH": path, "GPUFN_TEMPLATES": "0", "GPUFN_GPU_POWER_LIMIT": "300"}
        agent = start(node, nats.url_for("agent"), log, **settings)
        try:
            await node.until(lambda: [r for r in node.reports if r.facts.power_limits == {"GPU-0": 300.0}])
            assert node.home.power_limits.exists()
            agent.send_signal(signal.SIGTERM)
            assert await wait(agent) == 0
            assert not node.home.power_limits.exists()
        finally:
            agent.kill()
            await wait(agent)
            print(log.read_text())

    on_node(run)
