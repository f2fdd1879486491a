"""Node for tests: the real bus, the real agent in this process, and a fake worker that follows instructions."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import sys
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpufn_core.domain.devices.device import Device, DeviceShare, DeviceType
from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.domain.revision import Function, Revision
from gpufn_core.domain.worker import Assignment, Desired, ParkedMemory, WorkerState
from gpufn_core.errors import ArtifactUnavailable, GpufnError, SecretNotFound
from gpufn_core.home import Home
from gpufn_core.ids import Digest, digest_of, new_worker_id
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import KillOrder, LogLine
from gpufn_core.protocol.reports import NodeReport, RunnerReport, WorkerEvent, WorkerReport
from gpufn_core.spec.file_tree import FileTree, TreeFile
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.resources import Resources
from gpufn_core.spec.weights_spec import WeightsFile, WeightsSpec
from gpufn_local.nats_process import EmbeddedServer
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.bus.storage import object_store
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.signing.local_trust import LocalTrust
from gpufn_platform.signing.signatures import Signatures
from gpufn_runtime.agent.cache.bundles import BundleCache
from gpufn_runtime.agent.cache.caches import Caches
from gpufn_runtime.agent.cache.engines import EngineCache
from gpufn_runtime.agent.cache.weights import WeightsCache
from gpufn_runtime.agent.cache.weights_disk import PartFile
from gpufn_runtime.agent.devices.base import Inventory
from gpufn_runtime.agent.devices.declared import DeclaredInventory
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.egress.namespace import EgressNamespace
from gpufn_runtime.agent.launchers.choose import LauncherByImage
from gpufn_runtime.agent.launchers.process import ProcessLauncher
from gpufn_runtime.agent.launchers.template import TemplateLauncher
from gpufn_runtime.agent.loop import Agent
from gpufn_runtime.agent.mps.base import GpuShares
from gpufn_runtime.agent.mps.control import Control
from gpufn_runtime.agent.mps.daemon import ContainerFolders, Daemon
from gpufn_runtime.agent.mps.daemon_factory import DaemonFactory
from gpufn_runtime.agent.mps.daemons import MpsDaemons
from gpufn_runtime.agent.options import AgentBuckets, AgentOptions
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from tests.waiting import until_async

FAKE_WORKER = (sys.executable, "-S", os.fspath(Path(__file__).with_name("fake_worker.py")))
_numbers = itertools.count(1)


def _archive(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def _patient_daemon(gpu: str, folder: Path, **options: Any) -> Daemon:
    """Daemon with long timeouts: its programs start slowly on a busy machine."""
    daemon = Daemon(gpu, folder, start_timeout_s=30.0, **options)
    daemon.control = Control(daemon.pipe, timeout_s=30.0)
    return daemon


class FakeWeights:
    """Files of weights by digest. A fetch writes one byte, and the rest once `may_finish` is set."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.may_finish = asyncio.Event()
        self.may_finish.set()

    async def fetch(self, spec: FileTree, file: TreeFile, part: PartFile) -> None:
        if file.digest not in self.files:
            raise ArtifactUnavailable(f"{spec.source} has no {file.path}.")
        part.restart()
        part.add(self.files[file.digest][:1])
        await self.may_finish.wait()
        part.add(self.files[file.digest][1:])

    def put(self, source: str, data: bytes) -> WeightsSpec:
        self.files[digest_of(data)] = data
        return WeightsSpec(source=source, files=(WeightsFile("w", len(data), digest_of(data)),))


class FakeSecrets:
    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    async def values(self, spec: FunctionSpec, widest: Mapping[str, str]) -> dict[str, str]:
        missing = [name for name in spec.secrets if name not in self.known]
        if missing:
            raise SecretNotFound(f"{missing[0]} is not set.")
        return {name: self.known[name] for name in spec.secrets}


class Node:
    """`events` and `lines` are the agent's worker events and log lines, in order."""

    def __init__(self, bus: Bus, home: Home, assignments: KeyValue, functions: KeyValue, revisions: KeyValue) -> None:
        number = next(_numbers)
        self.name = f"n{number}-{os.getpid()}"
        self.function = f"f{number}-{os.getpid()}"
        self.bus, self.home, self.assignments = bus, home, assignments
        self.functions, self.revisions = functions, revisions
        self.signing, self.local_trust = KeyValue(bus, subjects.SIGNING), LocalTrust()
        self.bundles: dict[Digest, bytes] = {}
        self.engines: dict[str, EngineManifest] = {}
        self.engine_files: dict[str, bytes] = {}
        self.weights = FakeWeights()
        self.secrets = FakeSecrets()
        self.fetches = 0
        self.server: EmbeddedServer | None = None
        self.connected: dict[str, asyncio.Event] = {}
        self.events: list[WorkerEvent] = []
        self.lines: list[LogLine] = []
        self.reports: list[NodeReport] = []
        self._heard = asyncio.Event()
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.launcher: TemplateLauncher | None = None
        bus.subscribe(subjects.worker_event(self.function), self._keep(self.events, WorkerEvent))
        bus.subscribe(subjects.logs(self.function), self._keep(self.lines, LogLine))
        bus.subscribe(subjects.node_report(self.name), self._keep(self.reports, NodeReport))

    def _keep(self, into: list[Any], kind: Any) -> Callable[[Message], None]:
        decode = msgspec.msgpack.Decoder(kind).decode

        def on_message(message: Message) -> None:
            into.append(decode(message.payload))
            self._heard.set()

        return on_message

    async def use_the_platforms_buckets(self) -> None:
        """Settings for an agent in a process of its own."""
        self.functions = await KeyValue.open(self.bus, subjects.FUNCTIONS)
        self.revisions = await KeyValue.open(self.bus, subjects.REVISIONS)
        await KeyValue.open(self.bus, subjects.ENGINES)
        await KeyValue.open(self.bus, subjects.SECRETS)
        await KeyValue.open(self.bus, subjects.TEAMS)
        await KeyValue.open(self.bus, subjects.VOLUMES)
        await KeyValue.open(self.bus, subjects.SIGNING)
        for store in (subjects.BUNDLES, subjects.ENGINE_FILES, subjects.MODEL_FILES, subjects.VOLUME_FILES):
            await object_store.ensure_bucket(self.bus, store)

    async def fetch(self, digest: Digest) -> bytes:
        if digest not in self.bundles:
            raise ArtifactUnavailable("It belongs to another test.")
        self.fetches += 1
        return self.bundles[digest]

    async def find_engine(self, key: str) -> EngineManifest | None:
        return self.engines.get(key)

    async def fetch_file(self, digest: str, path: Path) -> None:
        self.fetches += 1
        await asyncio.to_thread(path.write_bytes, self.engine_files[digest])

    async def start(
        self,
        *,
        command: tuple[str, ...] = FAKE_WORKER,
        templates: int = 0,
        groups: MemoryGroups | None = None,
        gpus: tuple[Device, ...] = (),
        inventory: Inventory | None = None,
        prove_cuda: Callable[[Iterable[str]], None] = lambda gpus: None,
        **options: Any,
    ) -> None:
        self._stop = asyncio.Event()
        self.launcher = TemplateLauncher(
            ProcessLauncher(command),
            scratch=self.home.run / "t",
            limit=templates,
            command=command,
            fork_timeout_s=options.pop("fork_timeout_s", 2.0),
        )
        pool = Device(f"cpu-{self.name}", DeviceType.CPU, "CPU", 4 << 30, 2.0)
        daemon_factory = DaemonFactory(
            self.home.mps, ContainerFolders(self.home.shared_mps, self.home.mps_memory), _patient_daemon
        )
        by_daemons = MpsDaemons(daemon_factory, SystemClock(), check_every_s=0.1, leave_s=10.0, evict_s=10.0)
        shares: GpuShares = options.pop("shares", None) or by_daemons
        agent = Agent(
            node=self.name,
            home=self.home,
            bus=self.bus,
            buckets=AgentBuckets(assignments=self.assignments, functions=self.functions, revisions=self.revisions),
            caches=Caches(
                bundles=BundleCache(self.home.bundles, self.fetch),
                engines=EngineCache(self.home.engines, self.find_engine, self.fetch_file),
                weights=WeightsCache(self.home.weights, self.weights, 1 << 30),
            ),
            secrets=self.secrets,
            signatures=Signatures(self.signing, self.local_trust),
            launcher=LauncherByImage(self.launcher, None),
            groups=groups or MemoryGroups(None),
            devices=DeviceWatch(
                inventory or DeclaredInventory(gpus, pool), SystemClock(), other_trouble=shares.trouble, period_s=0.02
            ),
            shares=shares,
            egress=EgressNamespace(self.home, trouble="tests change no network"),
            clock=SystemClock(),
            prove_cuda=prove_cuda,
            options=AgentOptions(**{"grace_s": 2.0, "tick_s": 0.05, **options}),
        )
        self._tasks = [
            asyncio.create_task(self.launcher.run(), name="templates"),
            asyncio.create_task(agent.run(self._stop), name="agent"),
        ]
        await self.until(lambda: self.reports)

    async def stop(self) -> None:
        self._stop.set()
        if self._tasks:
            templates, agent = self._tasks
            self._tasks = []
            await agent
            templates.cancel()
            await asyncio.wait([templates])

    async def vanish(self) -> None:
        """Stop like after a crash: no events are sent and no workers are ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._tasks = []
        with contextlib.suppress(GpufnError):
            await self.bus.flush()  # receive its events now, so that they are not mistaken for its successor's

    async def deploy(
        self, fake: str = "sleep", *, number: int = 1, files: dict[str, str] | None = None, **options: Any
    ) -> Revision:
        data = _archive(files or {"app.py": f"def hello(): return {self.function!r}\n"})
        digest = digest_of(data)
        self.bundles[digest] = data
        options.setdefault("resources", Resources())
        spec = FunctionSpec(
            name=self.function,
            entry=EntryPoint("app", fake),
            methods=(MethodSpec(),),
            **options,
        )
        revision = Revision(function=self.function, number=number, spec=spec, bundle=digest, created_at=time.time())
        await self.revisions.put(subjects.revision_key(self.function, number), encode(revision))
        await self.activate(number)
        return revision

    async def activate(self, number: int, serving: int = 0) -> None:
        function = Function(
            name=self.function, active=number, serving=serving or number, latest=number, updated_at=time.time()
        )
        await self.functions.put(self.function, encode(function))

    async def assign(
        self,
        worker: str = "",
        *,
        desired: Desired = Desired.RUN,
        epoch: int = 1,
        revision: int = 1,
        gpu: str | None = None,
        share: DeviceShare | None = None,
    ) -> str:
        worker = worker or new_worker_id()
        assignment = Assignment(
            worker=worker,
            node=self.name,
            function=self.function,
            revision=revision,
            share=share or DeviceShare(f"cpu-{self.name}", 0.1, 1 << 28, gpus=(gpu,) if gpu else ()),
            epoch=epoch,
            created_at=time.time(),
            desired=desired,
        )
        await self.assignments.put(subjects.assignment_key(self.name, worker), encode(assignment))
        return worker

    async def unassign(self, worker: str) -> None:
        await self.assignments.delete(subjects.assignment_key(self.name, worker))

    def kill(self, worker: str) -> None:
        self.bus.publish(subjects.kill(self.name), encode(KillOrder(worker, "it took too long")))

    def runner_says(self, states: dict[str, WorkerState], parked: ParkedMemory | None = None) -> None:
        workers = tuple(
            WorkerReport(worker, self.function, 1, state, 1, parked=parked) for worker, state in states.items()
        )
        self.bus.publish(subjects.runner_report(self.name), encode(RunnerReport(self.name, "r", 1.0, workers)))

    async def until_disconnected(self) -> None:
        """Wait until this connection has noticed that the server is gone."""
        with contextlib.suppress(GpufnError):
            await self.bus.flush()

    async def until(self, condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
        """Wait until a received message makes `condition` true."""
        async with asyncio.timeout(timeout_s):
            while not (value := condition()):
                self._heard.clear()
                await self._heard.wait()
        return value

    async def event(self, worker: str, kind: str) -> WorkerEvent:
        found: list[WorkerEvent] = await self.until(
            lambda: [event for event in self.events if (event.worker, event.kind) == (worker, kind)]
        )
        return found[0]

    async def line(self, start: str) -> str:
        found: list[str] = await self.until(lambda: [line.text for line in self.lines if line.text.startswith(start)])
        return found[0]

    async def assigned(self) -> list[str]:
        return [key.rpartition(".")[2] for key in await self.assignments.keys(f"{self.name}.")]

    async def until_deleted(self, worker: str) -> None:
        """Wait until the agent has deleted the Assignment."""
        gone = asyncio.Event()
        key = subjects.assignment_key(self.name, worker)
        known: set[str] = set()

        def on_change(changed: str, entry: object) -> None:
            (known.add if entry else known.discard)(changed)
            if key not in known:
                gone.set()

        watch = await self.assignments.watch(on_change, prefix=key)
        try:
            if key in known:
                gone.clear()
                async with asyncio.timeout(30):
                    await gone.wait()
        finally:
            watch.stop()

    async def until_buried(self, worker: str) -> None:
        """Wait until the worker's folder is removed, which happens after the Assignment is deleted."""
        await self.until_deleted(worker)
        await until_async(lambda: not self.home.worker(worker).exists())

    async def pid(self, worker: str) -> int:
        await self.event(worker, "started")
        process = msgspec.json.decode((self.home.worker(worker) / "process.json").read_bytes())
        pid: int = process["process"]["pid"]
        return pid


@pytest.fixture
def memory_groups() -> MemoryGroups:
    groups = MemoryGroups.find()
    if groups.base is None:
        pytest.skip("cannot create memory cgroups here")
    return groups


Run = Callable[..., None]


@pytest.fixture
def on_node(nats: EmbeddedServer, tmp_path: Path) -> Run:
    """`on_node(test)` runs the coroutine function `test(node)` and then stops the agent."""

    @contextlib.asynccontextmanager
    async def node(server: EmbeddedServer) -> AsyncIterator[Node]:
        bus = await Bus.connect(server.url, name="test")
        home = Home(tmp_path / "h")
        made = Node(
            bus,
            home,
            await KeyValue.open(bus, subjects.ASSIGNMENTS),
            # Do not prefetch what other tests have deployed.
            await KeyValue.open(bus, f"functions_{next(_numbers)}"),
            await KeyValue.open(bus, f"revisions_{next(_numbers)}"),
        )
        made.server = server
        made.signing = await KeyValue.open(bus, f"signing_{next(_numbers)}")
        try:
            yield made
        finally:
            with contextlib.suppress(GpufnError):
                await made.stop()
            await bus.close()

    def run(test: Callable[[Node], Any], server: EmbeddedServer = nats) -> None:
        async def main() -> None:
            async with node(server) as made:
                await test(made)

        asyncio.run(main())

    return run
