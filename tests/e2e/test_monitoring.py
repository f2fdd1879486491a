"""With --full: a test causes each fault that an alert reports. The Alertmanager receives the alert, which ends after
the fault. Every query of the dashboards returns data. `prometheus.hurried` shortens all times; promtool tests the real
times.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpufn_core.domain.devices.device import Health
from gpufn_core.domain.devices.engine import Build
from gpufn_core.ids import new_ulid
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.spec.model_spec import ModelFile, ModelSpec
from gpufn_gateway.monitoring.dashboards import Needs
from gpufn_gateway.monitoring.rules import ALERTS
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import KeyValue
from tests.conftest import Platform, http_client, running_platform
from tests.e2e.chaos.gateway import Gateway, embedded_bus
from tests.e2e.gpu_node_stand_in import GpuNode
from tests.e2e.node import Node
from tests.e2e.prometheus import Prometheus, queries
from tests.e2e.small_disk import fill, small_disk
from tests.e2e.test_survival import pids_of
from tests.e2e.test_two_gateways import kill_workers
from tests.waiting import until

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "faulty.py"
DISK_MIB = 400
WITHIN_S = 150.0


class Scene:
    def __init__(self, platform: Platform, prometheus: Prometheus, gpus: GpuNode, folder: Path) -> None:
        self.platform, self.prometheus, self.gpus, self.folder = platform, prometheus, gpus, folder
        self.proven: dict[str, tuple[float, float]] = {}

    def prove(self, fault: Callable[[], contextlib.AbstractContextManager[object]], *alerts: str) -> None:
        """Make a fault until the Alertmanager has its alerts, then end it and wait for their end."""
        began = time.monotonic()
        with fault():
            until(lambda: set(alerts) <= self.prometheus.received(), self._state(alerts), within_s=WITHIN_S)
            fired_s = time.monotonic() - began
        ended = time.monotonic()
        until(lambda: not set(alerts) & self.prometheus.firing(), self._state(alerts), within_s=WITHIN_S)
        for alert in alerts:
            self.proven[alert] = fired_s, time.monotonic() - ended
            print(f"{alert:24} fired after {fired_s:5.1f} s, ended after {self.proven[alert][1]:5.1f} s")

    def _state(self, alerts: tuple[str, ...]) -> Callable[[], object]:
        return lambda: (alerts, self.prometheus.firing(), self.prometheus.received())

    def bus(self, action: Callable[[Bus], Any]) -> None:
        async def run() -> None:
            bus = await Bus.connect(embedded_bus(self.platform.home, "admin"), name="test")
            try:
                await action(bus)
            finally:
                await bus.close()

        asyncio.run(run())

    # --- faults ---

    @contextlib.contextmanager
    def gpu(self, **changes: Any) -> Iterator[None]:
        self.gpus.metrics = changes
        yield
        self.gpus.metrics = {}

    @contextlib.contextmanager
    def failed_gpu(self) -> Iterator[None]:
        self.gpus.health, self.gpus.health_reason = Health.FAILED, "Xid 79: it has fallen off the bus"
        yield
        self.gpus.health, self.gpus.health_reason = Health.HEALTHY, ""

    @contextlib.contextmanager
    def attribute(self, name: str, value: object) -> Iterator[None]:
        before = getattr(self.gpus, name)
        setattr(self.gpus, name, value)
        yield
        setattr(self.gpus, name, before)

    @contextlib.contextmanager
    def stopped_bus(self) -> Iterator[None]:
        [nats] = pids_of(self.platform, "nats")
        os.kill(nats, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(nats, signal.SIGCONT)

    @contextlib.contextmanager
    def unstored_audit(self) -> Iterator[None]:
        """The bus stalls while a request is recorded."""
        [nats] = pids_of(self.platform, "nats")
        os.kill(nats, signal.SIGSTOP)
        try:
            for _ in range(3):
                with contextlib.suppress(httpx.HTTPError):
                    httpx.delete(f"{self.platform.url}/v1/functions/nothing-here", timeout=1)
            yield
        finally:
            os.kill(nats, signal.SIGCONT)

    @contextlib.contextmanager
    def short_certificate(self) -> Iterator[None]:
        make_certificate(self.folder, days=2)  # the second gateway uses it without a restart
        yield
        make_certificate(self.folder, days=60)

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        filler = fill(self.folder / "disk", but_bytes=DISK_MIB << 14)  # a 64th stays free
        yield
        filler.unlink()

    @contextlib.contextmanager
    def killed_node(self) -> Iterator[None]:
        node = Node(self.platform.home, self.folder / "other-node", "other")
        with node:
            until(lambda: self.prometheus.query('gpufn_node_up{node="other"} == 1'), within_s=WITHIN_S)
            for role in ("agent", "runner"):
                node.kill(role)
            yield
            for role in ("agent", "runner"):
                node.start(role)
            until(lambda: self.prometheus.query('gpufn_node_up{node="other"} == 1'), within_s=WITHIN_S)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        with self._repeating(lambda client: client.post("/v1/functions/raises/invoke", json={"fail": True})):
            yield

    @contextlib.contextmanager
    def queue(self) -> Iterator[None]:
        submitted = self._repeating(lambda client: client.post("/v1/functions/slow/submit", json={"seconds": 1.0}), 0.2)
        with submitted:
            yield
        for call in self.platform.client.get("/v1/calls?limit=1000&state=queued").json()["calls"]:
            self.platform.client.delete(f"/v1/invocations/{call['id']}")

    @contextlib.contextmanager
    def failing_starts(self) -> Iterator[None]:
        flag = self.folder / "flag"
        flag.touch()
        with self._repeating(lambda client: client.post("/v1/functions/starts.ping/invoke", json={}, timeout=5), 1.0):
            yield
            flag.unlink()
            until(lambda: not self.prometheus.query("gpufn_function_start_blocked == 1"), within_s=WITHIN_S)

    @contextlib.contextmanager
    def limited_team(self) -> Iterator[None]:
        self.platform.gpufn("teams", "set", "t", "--owns", "prod/default/slow", "--owns", "slow", "--queued", "3")
        calls = [self.platform.client.post("/v1/functions/slow/submit", json={"seconds": 30.0}) for _ in range(4)]
        until(lambda: not self.prometheus.without_data(queries(Needs.LIMITS)), within_s=WITHIN_S)
        yield
        for call in calls:
            if "location" in call.headers:
                self.platform.client.delete(call.headers["location"])
        self.platform.gpufn("teams", "rm", "t", "--yes")

    @contextlib.contextmanager
    def waiting_build(self) -> Iterator[None]:
        model = ModelSpec(parameter="m", files=(ModelFile(name="m.onnx", digest="0" * 64, size=1),))
        build = Build(id=new_ulid(), model=model, device="NVIDIA None", created_at=time.time() - 100)
        self.bus(lambda bus: KeyValue(bus, subjects.BUILDS).put(build.id, encode(build)))
        yield
        self.platform.client.delete(f"/v1/builds/{build.id}")

    @contextlib.contextmanager
    def _repeating(self, call: Callable[[httpx.Client], object], pause_s: float = 0.05) -> Iterator[None]:
        stopped = threading.Event()

        def run() -> None:
            with http_client(self.platform.url) as client:
                while not stopped.wait(pause_s):
                    with contextlib.suppress(httpx.HTTPError):
                        call(client)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


def make_certificate(folder: Path, *, days: int) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-days", str(days), "-subj", "/CN=gateway", "-out", folder / "tls.pem", "-keyout", folder / "tls.key"],
        check=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    if not request.config.getoption("--full"):
        pytest.skip("five minutes of real faults: --full")
    app = tmp_path / "faulty.py"
    app.write_text(APP.read_text().replace("{flag}", str(tmp_path / "flag")))
    make_certificate(tmp_path, days=60)
    environ = {"GPUFN_TLS_CERT": f"{tmp_path}/tls.pem", "GPUFN_TLS_KEY": f"{tmp_path}/tls.key"}
    with (
        small_disk(tmp_path, mebibytes=DISK_MIB) as disk,
        running_platform(disk / "home") as platform,
        GpuNode(embedded_bus(disk / "home", "admin")) as gpus,
        Gateway(disk / "home", embedded_bus(disk / "home"), environ) as second,
    ):
        platform.gpufn("deploy", app)
        targets = [platform.url, second.url.replace("http:", "https:")]
        with Prometheus(tmp_path, targets, alertmanager=True) as prometheus:
            yield Scene(platform, prometheus, gpus, tmp_path)


def test_each_alert_fires_on_its_fault_and_ends_after_it(scene: Scene) -> None:
    prometheus, client = scene.prometheus, scene.platform.client
    for body in ({"fail": False}, {"fail": 1, "unknown": True}):
        client.post("/v1/functions/raises/invoke", json=body)
    client.post("/v1/functions/starts.ping/invoke", json={}).raise_for_status()

    # test_cluster checks the queries that need a cluster; the queries of limits follow below.
    wanted = queries(Needs.CALLS, Needs.GPU, Needs.FAULT, Needs.TLS)

    def lacking() -> list[str]:
        client.post("/v1/functions/raises/invoke", json={"fail": False})
        client.post("/v1/functions/raises/invoke", json={"unknown": True})
        return prometheus.without_data(wanted)

    lacking()
    until(lambda: prometheus.query('gpufn_starts_total{function="raises"}'))
    kill_workers(client, "raises")  # the time of starts needs a start between two scrapes
    until(lambda: not lacking(), lacking, within_s=WITHIN_S)
    print(f"{len(wanted)} queries have data")

    scene.prove(scene.short_certificate, "GpufnCertificateEnds")
    scene.prove(lambda: scene.attribute("functions", 25_000), "GpufnSeriesDropped")
    scene.prove(scene.waiting_build, "GpufnBuildsWait")
    scene.prove(scene.errors, "GpufnErrorBudgetFast", "GpufnErrorBudgetSlow")
    scene.prove(scene.killed_node, "GpufnNodeSilent")
    scene.prove(scene.unstored_audit, "GpufnAuditFails")
    scene.prove(scene.stopped_bus, "GpufnNoLeader", "GpufnBusDisconnected")
    scene.prove(lambda: scene.gpu(temperature_c=93), "GpufnGpuHot")
    scene.prove(lambda: scene.gpu(utilisation=0.95), "GpufnScaleOut")
    scene.prove(lambda: scene.gpu(utilisation=0.1), "GpufnScaleIn")
    scene.prove(scene.failed_gpu, "GpufnGpuQuarantined", "GpufnDrain")
    scene.prove(lambda: scene.attribute("has_small_share", True), "GpufnFragmented")
    scene.prove(lambda: scene.attribute("dropped_lines_per_s", 5), "GpufnLogsDropped")
    scene.prove(scene.full_disk, "GpufnBusDiskFull")
    scene.prove(scene.failing_starts, "GpufnStartsFail")
    scene.prove(scene.queue, "GpufnQueueGrows")
    scene.prove(scene.limited_team, "GpufnLimitUsed")
    assert {alert.name for alert in ALERTS} - scene.proven.keys() == set()
