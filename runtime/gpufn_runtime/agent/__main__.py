"""`python -m gpufn_runtime.agent`: builds the agent from its settings and runs it until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import hashlib
import importlib.metadata
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from gpufn_core.domain.engine import EngineManifest
from gpufn_core.errors import BusUnavailable, Conflict, GpufnError
from gpufn_core.home import Home
from gpufn_core.ids import Digest
from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.node_claim import claim_node
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.key_value import KeyValue, stream_of
from gpufn_platform.process import fd_limit
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.process.exits import EXIT_CONFIGURATION
from gpufn_platform.process.proc_hardening import hide_environment
from gpufn_platform.process.watchdog import tell_watchdog
from gpufn_runtime.agent.cache.bundles import BundleCache
from gpufn_runtime.agent.cache.engines import EngineCache
from gpufn_runtime.agent.cache.images import Images
from gpufn_runtime.agent.devices.base import Inventory
from gpufn_runtime.agent.devices.declared import DeclaredInventory, cpu_pool
from gpufn_runtime.agent.devices.facts import node_facts
from gpufn_runtime.agent.devices.nvml import NvmlInventory
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.launchers.choose import LauncherByImage
from gpufn_runtime.agent.launchers.containers.launcher import ContainerLauncher, Say
from gpufn_runtime.agent.launchers.process import ProcessLauncher
from gpufn_runtime.agent.launchers.template import StandbyLauncher
from gpufn_runtime.agent.loop import Agent
from gpufn_runtime.agent.mps.daemon import Daemon, Elsewhere
from gpufn_runtime.agent.mps.daemon_factory import DaemonMaker
from gpufn_runtime.agent.mps.daemons import MpsDaemons
from gpufn_runtime.agent.reports import image_log
from gpufn_runtime.agent.settings import AgentSettings
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from gpufn_runtime.agent.workers.environment import worker_packages

log = logging.getLogger("gpufn_runtime.agent")

_CONNECT_PAUSE_S = 0.2
_BUCKETS = (subjects.ASSIGNMENTS, subjects.FUNCTIONS, subjects.REVISIONS, subjects.ENGINES)
_STORES = (subjects.BUNDLES, subjects.ENGINE_FILES)
_WORKER_NEEDS = ("msgspec", "cloudpickle")


def main() -> int:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s agent %(name)s: %(message)s"
    )
    try:
        settings = AgentSettings.from_env()
        hide_environment("GPUFN_NATS_URL")
        files_at_first = fd_limit.allow_all()
        lock = _lock(settings.home)
    except GpufnError as error:
        sys.stderr.write(f"{error.message}\n")  # the supervisor shows a process's last line
        return EXIT_CONFIGURATION
    code = 0
    try:
        asyncio.run(_serve(settings, files_at_first))
    except* Conflict as errors:
        code = _why(errors, EXIT_CONFIGURATION)
    except* BusUnavailable as errors:  # also of a task
        code = _why(errors, 1)
    finally:
        os.close(lock)
    return code


def _why(errors: ExceptionGroup[GpufnError], code: int) -> int:
    for error in errors.exceptions:
        log.error("%s", error)
    return code


async def _serve(settings: AgentSettings, files_at_first: int) -> None:
    tell_watchdog()
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, told)
    bus = await _connect(settings.nats_url, stop)
    if bus is None:
        return
    try:
        await claim_node(bus, "agent", settings.node, settings.home)
        if await _there_is_a_gateway(bus, stop):
            await _work(settings, bus, stop, hurry, files_at_first)
    finally:
        await bus.close()


async def _there_is_a_gateway(bus: Bus, stop: asyncio.Event) -> bool:
    """Wait for the buckets that a gateway creates. False when told to stop first."""
    waiting = asyncio.create_task(
        streams.wait_for(bus, (*map(stream_of, _BUCKETS), *map(object_store.stream_of, _STORES))), name="buckets"
    )
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not waiting.done():
        waiting.cancel()
        return False
    waiting.result()
    return True


async def _work(
    settings: AgentSettings, bus: Bus, stop: asyncio.Event, hurry: asyncio.Event, files_at_first: int
) -> None:
    async def fetch(digest: Digest) -> bytes:
        return await object_store.get(bus, subjects.BUNDLES, digest)

    async def fetch_file(digest: str, path: Path) -> None:
        await object_store.get_file(bus, subjects.ENGINE_FILES, digest, path)

    manifests = KeyValue(bus, subjects.ENGINES)

    async def find_engine(key: str) -> EngineManifest | None:
        entry = await manifests.get(key)
        return msgspec.msgpack.decode(entry.value, type=EngineManifest) if entry is not None else None

    home, clock = settings.home, SystemClock()
    standbys = StandbyLauncher(ProcessLauncher(), scratch=home.run / "templates", limit=settings.templates)
    shares = _shares(settings, clock)
    containers = _containers(settings, image_log(bus, clock))
    agent = Agent(
        node=settings.node,
        home=home,
        bus=bus,
        assignments=KeyValue(bus, subjects.ASSIGNMENTS),
        functions=KeyValue(bus, subjects.FUNCTIONS),
        revisions=KeyValue(bus, subjects.REVISIONS),
        bundles=BundleCache(home.bundles, fetch),
        engines=EngineCache(home.engines, find_engine, fetch_file),
        launcher=LauncherByImage(standbys, containers),
        groups=MemoryGroups.find(),
        devices=_devices(settings, shares),
        shares=shares,
        clock=clock,
        default_image=settings.default_image,
        open_files=files_at_first,
        supervisor_fifo=settings.supervisor_fifo,
        park_bytes=settings.park_bytes,
        grace_s=settings.grace_s,
    )
    async with asyncio.TaskGroup() as tasks:  # should a task die, so do we: workers live on, to be adopted
        kept = [tasks.create_task(standbys.run(), name="templates")]
        if containers is not None:
            kept.append(tasks.create_task(containers.run(), name="containers"))
        await agent.run(stop, hurry)
        for task in kept:
            task.cancel()


def _containers(settings: AgentSettings, say: Say) -> ContainerLauncher | None:
    """None where Docker's package is not installed."""
    try:
        from gpufn_runtime.agent.launchers.containers.docker_client import Docker  # noqa: PLC0415
    except ImportError:
        return None
    daemon = Docker(settings.docker_host, build_network=settings.build_network)
    owner = f"gpufn-{hashlib.sha256(os.fsencode(settings.home.root)).hexdigest()[:12]}"
    images = Images(daemon, name=owner, bases=settings.base_image, worker_needs=_worker_needs())
    return ContainerLauncher(
        daemon,
        images,
        home=settings.home,
        owner={"gpufn.owner": owner},
        limit=settings.templates,
        packages=worker_packages(),
        say=say,
    )


def _worker_needs() -> list[str]:
    """As requirements: the versions that this node has, for pickles are made by one of them."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in _WORKER_NEEDS]


async def _connect(url: str, stop: asyncio.Event) -> Bus | None:
    """The bus may start after us. None when told to stop first."""
    has_said_why = False
    while not stop.is_set():
        try:
            return await Bus.connect(url, name="agent")
        except BusUnavailable as error:
            if not has_said_why:
                has_said_why = True
                log.warning("waiting for the bus: %s", error.message)
        await asyncio.sleep(_CONNECT_PAUSE_S)
    return None


def _shares(settings: AgentSettings, clock: SystemClock) -> MpsDaemons:
    make = functools.partial(Daemon, may_set_compute_mode=settings.mps_exclusive)
    home = settings.home
    return MpsDaemons(DaemonMaker(home.mps, Elsewhere(home.mps_elsewhere, home.mps_memory), make), clock)


def _devices(settings: AgentSettings, shares: MpsDaemons) -> DeviceWatch:
    pool = cpu_pool(settings.node, memory_bytes=settings.memory_bytes)
    inventory: Inventory = DeclaredInventory(settings.devices, pool) if settings.devices else NvmlInventory(pool)
    return DeviceWatch(inventory, SystemClock(), facts=node_facts, also_ill=shares.trouble)


def _lock(home: Home) -> int:
    """One agent per home: two would end each other's workers. Held until we die, however that happens."""
    home.ensure()
    descriptor = os.open(home.agent_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Conflict(f"Another agent runs on {home.root}: stop it, or give this one its own GPUFN_HOME.") from None
    return descriptor


if __name__ == "__main__":
    sys.exit(main())
