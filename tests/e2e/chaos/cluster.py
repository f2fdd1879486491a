"""Several nats-servers on this machine that form one bus."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Self

from gpufn_core.protocol.limits import MESSAGE_BYTES
from gpufn_local.nats_process import find_binary
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.tls import BusTls
from tests.ports import successive_ports
from tests.waiting import until

START_S = 30.0
_USER, _PASSWORD = "gpufn", "of-a-test"


class Cluster:
    """A cluster with the nodes n0, n1 and so on. A node keeps its port and its folder over restarts."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self._folder = folder
        self.nodes = range(nodes)
        ports = successive_ports(2 * nodes)
        self._clients, self._routes = ports[:nodes], ports[nodes:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * nodes

    @property
    def url(self) -> str:
        return ",".join(f"nats://{_USER}:{_PASSWORD}@127.0.0.1:{port}" for port in self._clients)

    @property
    def tls(self) -> BusTls:
        return BusTls()

    def config(self, node: int, folder: Path) -> str:
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes)
        return f"""\
server_name: n{node}
listen: "127.0.0.1:{self._clients[node]}"
max_payload: {MESSAGE_BYTES}
ping_interval: "5s"
ping_max: 2
write_deadline: "5s"
feature_flags {{ js_ack_fc_v2: false }}
jetstream {{ store_dir: "{folder}", max_memory_store: 1GB, max_file_store: 1TB }}
cluster {{ name: several, listen: "127.0.0.1:{self._routes[node]}", routes: [{routes}] }}
authorization {{ user: {_USER}, password: {_PASSWORD} }}
"""

    def pid(self, node: int) -> int:
        """Return the pid of a node; 0 while it does not run."""
        process = self._processes[node]
        return 0 if process is None else process.pid

    def start(self, node: int) -> None:
        """Start a node, and return at once. Its clients and peers connect to it later."""
        folder = self._folder / f"n{node}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "nats.conf").write_text(self.config(node, folder))
        with (folder / "nats.log").open("ab") as log:
            self._processes[node] = subprocess.Popen(
                [find_binary(), "-c", folder / "nats.conf"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"GOMAXPROCS": "1"},
                start_new_session=True,
            )

    def kill(self, node: int) -> None:
        process, self._processes[node] = self._processes[node], None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        for node in self.nodes:
            self.start(node)
        logs = [self._folder / f"n{node}" / "nats.log" for node in self.nodes]
        until(lambda: all(map(_has_met, logs)), f"the cluster is ready: {self._folder}", within_s=START_S)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process is not None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for node in self.nodes:
            if (process := self._processes[node]) is not None:
                try:
                    process.wait(START_S)
                except subprocess.TimeoutExpired:
                    self.kill(node)
                    raise


def about(cluster: Cluster, *streams: str) -> dict[str, dict[str, Any]]:
    """Return what the leaders of these streams, or of all streams, report. Raises BusUnavailable without a leader."""

    async def ask() -> dict[str, dict[str, Any]]:
        bus = await Bus.connect(cluster.url, name="test", tls=cluster.tls)
        try:
            names = streams or (await bus.js("STREAM.NAMES"))["streams"]
            return {name: await bus.js(f"STREAM.INFO.{name}", timeout_s=1) for name in names}
        finally:
            await bus.close()

    return asyncio.run(ask())


def leader(cluster: Cluster, stream: str) -> int:
    """Return the node that leads a stream. Raises BusUnavailable without a leader."""
    name: str = about(cluster, stream)[stream]["cluster"]["leader"]
    return int(name.removeprefix("n"))


def behind(cluster: Cluster) -> list[str]:
    """Return the streams with a replica that is behind. Raises BusUnavailable while a stream has no leader."""
    return [
        f"{name}: {replica['name']}"
        for name, info in about(cluster).items()
        for replica in info["cluster"].get("replicas", ())
        if not replica["current"]
    ]


def _has_met(log: Path) -> bool:
    """Return whether this node knows the leader of JetStream."""
    return b"metadata leader" in log.read_bytes()
