"""`python -m gpufn_runtime.agent`: runs the agent until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import logging
import operator
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.errors import BusUnavailable, Conflict, GpufnError
from gpufn_core.find_uv import find_uv
from gpufn_core.home import Home
from gpufn_core.ids import Digest
from gpufn_core.protocol import subjects
from gpufn_core.protocol.launch import Sandbox
from gpufn_core.spec.isolation import Network
from gpufn_core.weights.credentials import CREDENTIALS
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.node_claim import claim_node
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.bus.storage.key_value import KeyValue, stream_of
from gpufn_platform.bus.tls import BusTls
from gpufn_platform.process import fd_limit
from gpufn_platform.process.clock import Clock, SystemClock
from gpufn_platform.process.file_lock import lock_file
from gpufn_platform.process.proc_hardening import hide_environment
from gpufn_platform.process.settings import EXIT_CONFIGURATION, InvalidSetting
from gpufn_platform.process.watchdog import notify_watchdog
from gpufn_platform.sandbox import policy
from gpufn_platform.sandbox.host_paths import behind_links, own_python_folders, system_secrets
from gpufn_platform.sandbox.support import Support, probe
from gpufn_platform.secrets.master_key import KEY, MasterKey
from gpufn_platform.signing.local_trust import LocalTrust
from gpufn_platform.signing.signatures import Signatures
from gpufn_platform.volume_store.choose import volume_store
from gpufn_platform.volume_store.store import VolumeStore
from gpufn_runtime.agent.bytecode.background import BackgroundCompiler
from gpufn_runtime.agent.bytecode.compiler import Compiler
from gpufn_runtime.agent.cache.build_log import LogLine
from gpufn_runtime.agent.cache.bundles import BundleCache
from gpufn_runtime.agent.cache.caches import Caches
from gpufn_runtime.agent.cache.engines import EngineCache
from gpufn_runtime.agent.cache.images import Images
from gpufn_runtime.agent.cache.volumes import Volumes
from gpufn_runtime.agent.cache.weights import WeightsCache
from gpufn_runtime.agent.cache.weights_fetch import WeightsFetch
from gpufn_runtime.agent.devices.base import Inventory
from gpufn_runtime.agent.devices.cuda_proofs import CudaProofs
from gpufn_runtime.agent.devices.declared import DeclaredInventory, cpu_pool
from gpufn_runtime.agent.devices.facts import has_own_pids, node_facts
from gpufn_runtime.agent.devices.failed_gpus import FailedGpus
from gpufn_runtime.agent.devices.nvml import NvmlInventory
from gpufn_runtime.agent.devices.power_limits import PowerLimits
from gpufn_runtime.agent.devices.watch import DeviceWatch
from gpufn_runtime.agent.egress import availability
from gpufn_runtime.agent.egress.container_network import ContainerNetwork
from gpufn_runtime.agent.egress.namespace import EgressNamespace
from gpufn_runtime.agent.environments.build import Confinement, Limits
from gpufn_runtime.agent.environments.cache import EnvironmentCache, link_packages
from gpufn_runtime.agent.environments.environment import Environment
from gpufn_runtime.agent.isolation import gpu_devices, tiers
from gpufn_runtime.agent.isolation.sandboxes import Sandboxes
from gpufn_runtime.agent.launchers.choose import LauncherByImage
from gpufn_runtime.agent.launchers.containers.launcher import ContainerLauncher
from gpufn_runtime.agent.launchers.process import ProcessLauncher
from gpufn_runtime.agent.launchers.template import TemplateLauncher
from gpufn_runtime.agent.loop import Agent
from gpufn_runtime.agent.mps.daemon import ContainerFolders, Daemon
from gpufn_runtime.agent.mps.daemon_factory import DaemonFactory
from gpufn_runtime.agent.mps.daemons import MpsDaemons
from gpufn_runtime.agent.node_address import address_towards
from gpufn_runtime.agent.options import AgentBuckets, AgentOptions
from gpufn_runtime.agent.reports import image_log
from gpufn_runtime.agent.selinux import label_for_containers
from gpufn_runtime.agent.settings import AgentSettings
from gpufn_runtime.agent.workers.cgroups import MemoryGroups
from gpufn_runtime.agent.workers.environment import worker_packages
from gpufn_runtime.agent.workers.secret_values import StoredSecrets

log = logging.getLogger("gpufn_runtime.agent")

_CONNECT_PAUSE_S = 0.2
_BUCKETS = (
    subjects.ASSIGNMENTS,
    subjects.FUNCTIONS,
    subjects.REVISIONS,
    subjects.ENGINES,
    subjects.SECRETS,
    subjects.TEAMS,
    subjects.SIGNING,
    subjects.VOLUMES,
)
_STORES = (subjects.BUNDLES, subjects.ENGINE_FILES, subjects.MODEL_FILES, subjects.VOLUME_FILES)
_WORKER_NEEDS = ("msgspec", "cloudpickle")


def main() -> int:
    gc.freeze()  # neither later collections nor the exit visit the imported modules, which takes 0.05 to 0.1 s
    line = "%(asctime)s %(levelname)s agent %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=line)
    try:
        settings = AgentSettings.from_env()
        support = probe()  # it forks, and a process that hides its environment cannot create a user namespace
        hide_environment("GPUFN_NATS_URL", KEY, *CREDENTIALS)
        open_files = fd_limit.raise_to_hard_limit()
        lock = _lock(settings.home)
        policy.check(settings.isolation, support)
    except GpufnError as error:
        sys.stderr.write(f"{error.message}\n")  # the supervisor shows a process's last line
        return EXIT_CONFIGURATION
    code = 0
    try:
        asyncio.run(_serve(settings, open_files, support))
    except* (Conflict, BusUnavailable, InvalidSetting) as errors:  # may come from a background task
        for problem in errors.exceptions:
            log.error("%s", problem)
        code = 1 if errors.subgroup(BusUnavailable) else EXIT_CONFIGURATION
    finally:
        os.close(lock)
    return code


async def _serve(settings: AgentSettings, open_files: int, support: Support) -> None:
    notify_watchdog()
    stop, force_stop = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (force_stop if stop.is_set() else stop).set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    bus = await _connect(settings.nats_url, stop)
    if bus is None:
        return
    try:
        await claim_node(bus, "agent", settings.node, settings.home)
        if await _wait_for_gateway(bus, stop):
            await _run_agent(settings, bus, stop, force_stop, open_files=open_files, support=support)
    finally:
        await bus.close()


async def _wait_for_gateway(bus: Bus, stop: asyncio.Event) -> bool:
    """Wait for the buckets that the gateway creates. Returns False if stopped first."""
    needed = (*map(stream_of, _BUCKETS), *map(object_store.stream_of, _STORES))
    waiting = asyncio.create_task(streams.wait_for(bus, needed), name="buckets")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not waiting.done():
        waiting.cancel()
        return False
    waiting.result()
    return True


async def _run_agent(
    settings: AgentSettings,
    bus: Bus,
    stop: asyncio.Event,
    force_stop: asyncio.Event,
    *,
    open_files: int,
    support: Support,
) -> None:
    home, clock = settings.home, SystemClock()
    volume_files = volume_store(settings.volume_store, os.environ, bus, clock)
    secrets = StoredSecrets(KeyValue(bus, subjects.SECRETS), MasterKey.from_env(os.environ, home))
    await secrets.check()
    groups = MemoryGroups.find()
    sandboxes = _sandboxes(settings, support, groups)
    isolation_trouble = tiers.trouble(settings.isolation, support, await asyncio.to_thread(availability.trouble))
    egress = EgressNamespace(
        home,
        settings.egress_allow,
        trouble=isolation_trouble.get(Network.EGRESS, ""),
        report=functools.partial(operator.setitem, isolation_trouble, Network.EGRESS),
    )
    await egress.start()
    templates = TemplateLauncher(
        ProcessLauncher(),
        scratch=home.run / "templates",
        limit=settings.templates,
        sandbox_of=None if sandboxes is None else functools.partial(_template_sandbox, sandboxes, egress),
        imports_with_env=settings.isolation is not policy.Isolation.STRICT,
    )
    shares = _shares(settings, clock)
    proofs = CudaProofs()
    devices = _devices(settings, shares, proofs)
    power_limits = PowerLimits(home.power_limits, settings.gpu_power_limits)
    devices.facts = power_limits.apply(devices.gpus, devices.facts)
    containers = _containers(settings, image_log(bus, clock, settings.node), has_gpus=bool(devices.gpus))
    if containers is not None:
        mounted = (home.run, home.cache, home.claim_shared_bodies(), *map(Path, worker_packages()))
        await asyncio.to_thread(label_for_containers, *mounted)
    agent = Agent(
        node=settings.node,
        home=home,
        bus=bus,
        buckets=AgentBuckets(
            assignments=KeyValue(bus, subjects.ASSIGNMENTS),
            functions=KeyValue(bus, subjects.FUNCTIONS),
            revisions=KeyValue(bus, subjects.REVISIONS),
            teams=KeyValue(bus, subjects.TEAMS),
        ),
        caches=_caches(settings, bus, clock, volume_files=volume_files, sandboxes=sandboxes, groups=groups),
        bytecode=_bytecode(sandboxes, groups),
        secrets=secrets,
        signatures=Signatures(KeyValue(bus, subjects.SIGNING), LocalTrust.from_env(os.environ)),
        launcher=LauncherByImage(templates, containers),
        groups=groups,
        devices=devices,
        shares=shares,
        egress=egress,
        clock=clock,
        prove_cuda=proofs.request,
        sandboxes=sandboxes,
        options=AgentOptions(
            default_image=settings.default_image,
            open_files=open_files,
            supervisor_fifo=settings.supervisor_fifo,
            isolation_trouble=isolation_trouble,
            park_bytes=settings.park_bytes,
            grace_s=settings.grace_s,
            address=settings.address or address_towards(settings.nats_url),
        ),
    )
    # If a task fails, the agent ends; workers live on and are adopted.
    async with contextlib.aclosing(volume_files), asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(templates.run(), name="templates")]
        if not settings.devices:
            background.append(tasks.create_task(proofs.run(), name="proofs"))
        if containers is not None:
            background.append(tasks.create_task(containers.run(), name="containers"))
        await agent.run(stop, force_stop)
        for task in background:
            task.cancel()
    await egress.remove()
    power_limits.restore()  # not after an error: workers live on, and the next agent restores the limits first


def _caches(
    settings: AgentSettings,
    bus: Bus,
    clock: Clock,
    *,
    volume_files: VolumeStore,
    sandboxes: Sandboxes | None,
    groups: MemoryGroups,
) -> Caches:
    async def fetch(digest: Digest) -> bytes:
        return await object_store.get(bus, subjects.BUNDLES, digest)

    async def fetch_file(digest: str, path: Path) -> None:
        await object_store.get_file(bus, subjects.ENGINE_FILES, digest, path)

    def read_weights(digest: str) -> AsyncGenerator[bytes, None]:
        return object_store.read(bus, subjects.MODEL_FILES, digest)

    manifests = KeyValue(bus, subjects.ENGINES)

    async def find_engine(key: str) -> EngineManifest | None:
        entry = await manifests.get(key)
        return msgspec.msgpack.decode(entry.value, type=EngineManifest) if entry is not None else None

    home = settings.home
    fetch_weights = WeightsFetch(read_weights, os.environ, clock, read_volumes=volume_files.read)
    return Caches(
        bundles=BundleCache(home.bundles, fetch),
        engines=EngineCache(home.engines, find_engine, fetch_file),
        weights=WeightsCache(home.weights, fetch_weights, settings.weights_bytes),
        volumes=Volumes(KeyValue(bus, subjects.VOLUMES), volume_files.get),
        environments=_environments(settings, sandboxes, groups),
    )


async def _template_sandbox(
    sandboxes: Sandboxes, egress: EgressNamespace, scratch: Path, *, network: Network, python: Environment | None
) -> Sandbox:
    namespace = await egress.ready() if network is Network.EGRESS else None
    return sandboxes.template(scratch, network=network, python=python, egress=namespace)


def _sandboxes(settings: AgentSettings, support: Support, groups: MemoryGroups) -> Sandboxes | None:
    """Return None if worker processes are not confined."""
    log.log(
        logging.INFO if policy.is_complete(settings.isolation, support) else logging.WARNING,
        "worker processes run %s",
        policy.describe(settings.isolation, support),
    )
    if settings.isolation is policy.Isolation.OFF:
        return None
    home = settings.home
    home.claim_shared_bodies()
    for folder in (home.engines, home.weights, home.mps):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    gpu_devices.create()
    return Sandboxes(
        home,
        own_python_folders(map(os.path.dirname, worker_packages()), os.environ),
        folders=settings.sandbox_folders,
        packages=tuple(worker_packages()),
        private=(*system_secrets(), *behind_links(home.root, home.run)),
        cgroups=groups.base,
        namespaces=not support.namespaces,
        own_pids=not support.processes,
    )


def _environments(settings: AgentSettings, sandboxes: Sandboxes | None, groups: MemoryGroups) -> EnvironmentCache:
    confinement = None if sandboxes is None else Confinement(sandboxes.hidden, sandboxes.namespaces)
    return EnvironmentCache(
        settings.home.python,
        packages=link_packages(settings.home.worker_packages, worker_packages()),
        find_uv=find_uv,
        environ=os.environ,
        confinement=confinement,
        limit_bytes=settings.environments_bytes,
        build_limits=Limits(settings.image_build_memory_bytes, settings.image_build_disk_bytes, groups),
    )


def _bytecode(sandboxes: Sandboxes | None, groups: MemoryGroups) -> BackgroundCompiler | None:
    """Return None if workers write byte code themselves, because they have no sandbox."""
    return None if sandboxes is None else BackgroundCompiler(Compiler(sandboxes, groups, os.environ).compile)


def _containers(settings: AgentSettings, log_line: LogLine, *, has_gpus: bool) -> ContainerLauncher | None:
    """Return None if the docker package is not installed."""
    try:
        from gpufn_runtime.agent.launchers.containers.docker_client import Docker  # noqa: PLC0415
    except ImportError:
        return None
    daemon = Docker(settings.docker_host, build_network=settings.build_network)
    owner = f"gpufn-{hashlib.sha256(os.fsencode(settings.home.root)).hexdigest()[:12]}"
    # With this node's versions: workers exchange pickles with this node.
    worker_needs = [f"{name}=={importlib.metadata.version(name)}" for name in _WORKER_NEEDS]
    images = Images(daemon, name=owner, bases=settings.base_image, worker_needs=worker_needs)
    owner_label = {"gpufn.owner": owner}
    allowed = settings.egress_allow
    egress = ContainerNetwork(
        daemon, settings.home, allowed, owner=owner_label, trouble=availability.trouble(for_containers=True)
    )
    return ContainerLauncher(
        daemon,
        images,
        home=settings.home,
        owner=owner_label,
        limit=settings.templates,
        packages=worker_packages(),
        log_line=log_line,
        egress=egress,
        has_gpus=has_gpus,
    )


async def _connect(url: str, stop: asyncio.Event) -> Bus | None:
    """Connect, and retry until the bus is up. Returns None if stopped first."""
    has_warned = False
    while not stop.is_set():
        try:
            return await Bus.connect(url, name="agent", tls=BusTls.from_env(os.environ))
        except BusUnavailable as error:
            if not has_warned:
                has_warned = True
                log.warning("waiting for the bus: %s", error.message)
        await asyncio.sleep(_CONNECT_PAUSE_S)
    return None


def _shares(settings: AgentSettings, clock: SystemClock) -> MpsDaemons:
    make = functools.partial(Daemon, may_set_compute_mode=settings.mps_exclusive)
    home = settings.home
    daemon_factory = DaemonFactory(home.mps, ContainerFolders(home.shared_mps, home.mps_memory), make)
    return MpsDaemons(daemon_factory, clock, checks_clients=not has_own_pids())


def _devices(settings: AgentSettings, shares: MpsDaemons, proofs: CudaProofs) -> DeviceWatch:
    pool = cpu_pool(settings.node, memory_bytes=settings.memory_bytes)
    inventory: Inventory = DeclaredInventory(settings.devices, pool) if settings.devices else NvmlInventory(pool)
    return DeviceWatch(
        inventory,
        SystemClock(),
        facts=node_facts,
        other_trouble=lambda uuid: shares.trouble(uuid) or proofs.trouble(uuid),
        failed_gpus=FailedGpus(settings.home.failed_gpus),
    )


def _lock(home: Home) -> int:
    """Lock the home, until the process ends. Two agents on one home would end each other's workers."""
    home.ensure()
    try:
        return lock_file(home.agent_lock)
    except BlockingIOError:
        raise Conflict(f"Another agent runs on {home.root}. Stop it, or set another GPUFN_HOME.") from None


if __name__ == "__main__":
    sys.exit(main())
