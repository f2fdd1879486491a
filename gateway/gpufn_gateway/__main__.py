"""``python -m gpufn_gateway``: the gateway process, put together here and nowhere else.

Start     settings → bus, and whether we can run on it → streams and buckets → registry → caller → what answers and
          what works in the background → listen, and say where on stdout
Shutdown  1. stop listening; what is under way ends (`stopping`)   2. the controller gives up its lease
          3. ticks and watches stop   4. the bus is closed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from starlette.routing import Route

from gpufn_core.errors import BusUnavailable, PlatformError
from gpufn_core.home import Home
from gpufn_core.ids import new_ulid
from gpufn_gateway.app import App
from gpufn_gateway.auth.access import Access, NotProtected
from gpufn_gateway.auth.quota_sync import KeyUses
from gpufn_gateway.buckets import Buckets
from gpufn_gateway.builds.artifacts import Artifacts
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.builds.engines import Engines
from gpufn_gateway.builds.orphaned_builds import Unattended
from gpufn_gateway.builds.revision_activation import Finishing
from gpufn_gateway.bus_setup import Storage
from gpufn_gateway.calls.fast_path import Lane
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.calls.shared_bodies import GatewayParcels
from gpufn_gateway.calls.stored_bodies import References
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.loop import Controller
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.garbage_collection.collector import Collection
from gpufn_gateway.http.body_budget import Readers
from gpufn_gateway.http.body_reader import BodyBudget
from gpufn_gateway.http.host_field import is_loopback
from gpufn_gateway.http.server import Server, listen
from gpufn_gateway.maps.maps import Maps
from gpufn_gateway.oip.inference import Inference
from gpufn_gateway.routes.artifacts import ArtifactRoutes
from gpufn_gateway.routes.builds import BuildRoutes
from gpufn_gateway.routes.dead_letters import DeadLetterRoutes
from gpufn_gateway.routes.engines import EngineRoutes
from gpufn_gateway.routes.functions import FunctionRoutes
from gpufn_gateway.routes.invocations import InvocationRoutes
from gpufn_gateway.routes.invoke import Invoke
from gpufn_gateway.routes.maps import MapRoutes
from gpufn_gateway.routes.oip import OipRoutes
from gpufn_gateway.routes.operations import OperationRoutes
from gpufn_gateway.routes.schedules import ScheduleRoutes
from gpufn_gateway.routes.usage import UsageRoutes
from gpufn_gateway.routes.webhooks import WebhookRoutes
from gpufn_gateway.schedules.runs import ScheduleRuns
from gpufn_gateway.schedules.store import Schedules
from gpufn_gateway.settings import GatewaySettings
from gpufn_gateway.stopping import Stopping
from gpufn_gateway.store_sync import StoreSync
from gpufn_gateway.submitted.dead_letters import DeadLetters
from gpufn_gateway.submitted.reaper import Reaper
from gpufn_gateway.submitted.submit import Submissions
from gpufn_gateway.telemetry import Telemetry
from gpufn_gateway.timers import tick
from gpufn_gateway.webhooks.address_policy import Addresses
from gpufn_gateway.webhooks.deliveries import Deliveries
from gpufn_gateway.webhooks.secrets import WebhookSecrets
from gpufn_gateway.webhooks.sender import Post
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.server_check import check_server
from gpufn_platform.process import fd_limit, grace_period
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.process.exits import EXIT_CONFIGURATION
from gpufn_platform.process.proc_hardening import hide_environment
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.process.watchdog import tell_watchdog
from gpufn_platform.queue.caller import Caller

log = logging.getLogger("gpufn_gateway")

_BUS_PATIENCE_S: Final = 30.0  # at start; the supervisor starts us together with the bus
_ELECTION_S: Final = 45.0  # an election takes about 5 s, as does each request that meets one; `gpufn up` waits for 60
_AGAIN_AFTER_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What is open while the process lives."""

    settings: GatewaySettings
    clock: SystemClock
    name: str
    bus: Bus
    storage: Storage
    buckets: Buckets
    access: Access
    registry: Registry
    builds: Builds
    schedules: Schedules
    caller: Caller
    lane: Lane
    parcels: GatewayParcels


async def main(settings: GatewaySettings) -> None:
    tell_watchdog()
    async with contextlib.AsyncExitStack() as stack:
        opened = await _open_patiently(settings, stack)
        gateway = _Gateway(opened)
        listener = listen(settings)
        stack.callback(listener.close)
        stopping = Stopping(
            opened.caller,
            grace_s=lambda: grace_period.grace_s(Home.from_env(), settings.grace_s),
            others_s=settings.shutdown_timeout_s,
        )
        server = Server(gateway.app(), settings, stopping)
        for name, duty in gateway.duties(server):
            stack.push_async_callback(_cancel, asyncio.create_task(duty, name=name))
        stack.push_async_callback(_cancel, asyncio.create_task(server.announce(listener), name="announce"))
        await server.serve([listener])


async def _open_patiently(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> _Opened:
    """`_open`, from the start again while streams of the bus have no leader: one of its nodes is away, say.

    Raises BusUnavailable when that takes longer than an election does, and what `_open` raises else.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + _ELECTION_S
    while True:
        try:
            async with contextlib.AsyncExitStack() as attempt:
                opened = await _open(settings, attempt)
                stack.push_async_callback(attempt.pop_all().aclose)
                return opened
        except BusUnavailable as error:
            if loop.time() >= give_up_at:
                raise
            log.warning("the gateway cannot start yet, and tries again: %s", error)
        await asyncio.sleep(_AGAIN_AFTER_S)


async def _open(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> _Opened:
    """`stack` closes it. Raises BusUnavailable, NotProtected, PlatformError."""
    clock, name = SystemClock(), f"gw-{new_ulid()[-12:]}"
    bus = await Bus.connect(settings.nats_url, name=name, patience_s=_BUS_PATIENCE_S)
    stack.push_async_callback(bus.close)
    await check_server(bus)
    buckets = await Buckets.open(bus)
    storage = Storage(bus, buckets)
    await storage.ensure()

    access = Access(loopback=is_loopback(settings.host))
    registry = Registry(clock, access)
    stack.callback(registry.stop)
    await registry.start(bus, buckets)
    access.check_protected(settings.host)
    builds = Builds(bus, buckets.builds, clock)
    stack.callback(builds.stop)
    await builds.start()
    schedules = Schedules(bus, buckets.schedules, registry, clock)
    stack.callback(schedules.stop)
    await schedules.start()

    caller = Caller(bus, name=name, clock=clock)
    home = Home.from_env()
    home.ensure()
    lane = Lane(home.lane_socket, caller)
    stack.callback(lane.close)
    parcels = GatewayParcels(
        home.claim_parcels(),
        name,
        budget=BodyBudget(settings.max_parcels_bytes),
        reaches_all=lambda: lane.is_connected and len(registry.live_nodes()) == 1,
    )
    parcels.open()
    stack.callback(parcels.close)
    caller.start(lane, parcels=parcels.folder, drop=parcels.remove)
    return _Opened(
        settings=settings,
        clock=clock,
        name=name,
        bus=bus,
        storage=storage,
        buckets=buckets,
        access=access,
        registry=registry,
        builds=builds,
        schedules=schedules,
        caller=caller,
        lane=lane,
        parcels=parcels,
    )


class _Gateway:
    """What answers, and what works in the background, on what is open."""

    def __init__(self, opened: _Opened) -> None:
        self._open = opened
        bus, registry = opened.bus, opened.registry
        self._telemetry = Telemetry(lambda: opened.caller.pending, registry.live_runners)
        registry.on_runner_report = self._telemetry.attempts.take
        self._readers = Readers(opened.settings, int(bus.server_info["max_payload"]), opened.parcels)
        self._uses = KeyUses.on(bus, opened.buckets.usage, opened.name, opened.clock)
        self._calls = Calls(
            bus=bus,
            queue=opened.caller,
            registry=registry,
            access=opened.access,
            telemetry=self._telemetry,
            bodies=self._readers.of_calls,
            clock=opened.clock,
            uses=self._uses,
            parcels=opened.parcels,
            references=References(bus, opened.parcels),
        )
        self._addresses = Addresses(opened.settings.webhook_networks)
        self._webhook_secrets = WebhookSecrets(opened.buckets.webhook_secrets)
        store = opened.settings.nats_store
        self._disk = StoreSync(Path(store) if store else None, waits=opened.settings.sync.waits)
        self._submissions = Submissions(bus, self._calls, self._disk, self._addresses)
        self._invoke = Invoke(self._calls, self._submissions)
        self._artifacts = Artifacts(bus)
        self._deploys = Deploys(
            bus,
            opened.buckets,
            registry=registry,
            builds=opened.builds,
            artifacts=self._artifacts,
            addresses=self._addresses,
            clock=opened.clock,
        )

    def app(self) -> App:
        inference = Inference(self._calls, self._invoke, self._readers.of_calls)
        return App(self._invoke, inference, self._open.access, self._routes(), self._disk)

    def _routes(self) -> list[Route]:
        bus, registry, builds, clock = self._open.bus, self._open.registry, self._open.builds, self._open.clock
        access, buckets = self._open.access, self._open.buckets
        bodies = self._readers.of_management
        return [
            *FunctionRoutes(
                bus=bus,
                registry=registry,
                deploys=self._deploys,
                builds=builds,
                submissions=self._submissions,
                bodies=bodies,
                bundle_bodies=self._readers.of_bundles,
            ).routes(),
            *InvocationRoutes(self._submissions).routes(),
            *MapRoutes(Maps(bus, self._calls, self._readers.of_calls, self._addresses)).routes(),
            *DeadLetterRoutes(DeadLetters(bus, self._calls)).routes(),
            *ArtifactRoutes(self._artifacts, self._open.settings.max_model_bytes).routes(),
            *BuildRoutes(bus=bus, builds=builds, artifacts=self._artifacts, bodies=bodies).routes(),
            *WebhookRoutes(self._webhook_secrets, access).routes(),
            *ScheduleRoutes(self._open.schedules, self._calls, bodies).routes(),
            *EngineRoutes(Engines(bus, buckets, registry, clock), bodies).routes(),
            *OipRoutes(registry, self._telemetry, self._why_not_ready).routes(),
            *UsageRoutes(buckets.usage, registry, clock).routes(),
            *OperationRoutes(
                registry=registry,
                counters=self._telemetry,
                access=access,
                keys=buckets.keys,
                bodies=bodies,
                clock=clock,
                why_not_ready=self._why_not_ready,
            ).routes(),
        ]

    def _why_not_ready(self) -> str | None:
        if not self._open.bus.connected:
            return "the message bus is not connected"
        if not self._open.storage.is_ready:
            return "the queues are being made"
        if self._disk.is_full():
            return "the disk of the message bus is full"
        return self._open.registry.why_not_ready()

    def duties(self, server: Server) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """What runs until cancelled, by name."""
        bus, registry, builds, clock = self._open.bus, self._open.registry, self._open.builds, self._open.clock
        buckets, schedules, settings = self._open.buckets, self._open.schedules, self._open.settings
        controller = Controller(
            bus,
            functions=buckets.functions,
            revisions=buckets.revisions,
            assignments=buckets.assignments,
            leases=buckets.leases,
            name=self._open.name,
            clock=clock,
            limits=Limits(share_across_domains=settings.share_across_domains),
        )
        collection = Collection(
            bus,
            buckets,
            registry=registry,
            builds=builds,
            in_use=lambda: controller.world.in_use(clock.monotonic()) if controller.leads else None,
            kept_revisions=settings.kept_revisions,
            clock=clock,
        )
        registry.on_deleted += [self._telemetry.forget, collection.on_deleted]

        def leads() -> bool:
            return controller.leads

        yield (
            "ticks",
            tick(
                caller=self._open.caller,
                lane=self._open.lane,
                parcels=self._open.parcels,
                invoke=self._invoke,
                uses=self._uses,
                server=server,
                clock=clock,
            ),
        )
        yield "uses of keys", self._uses.run()
        yield "controller", _control(controller)
        finishing = Finishing(registry=registry, builds=builds, deploys=self._deploys, clock=clock, leads=leads)
        yield "finishing", finishing.run()
        yield "unattended", Unattended(bus, builds, registry, clock, leads).run()
        yield "schedules", ScheduleRuns(schedules, registry, clock, self._disk, leads=leads).run()
        post = Post(self._addresses)
        yield "webhooks", Deliveries(bus, self._webhook_secrets, post, clock, self._telemetry).run()
        yield "collection", collection.run()
        yield "reaper", Reaper(bus, registry, clock, leads=leads).run()


async def _control(controller: Controller) -> None:
    """The controller classifies its own failures; one that gets here is a defect, and calls must go on without it."""
    while True:
        try:
            await controller.run()
        except Exception:
            log.exception("the controller failed; it starts again")
        await asyncio.sleep(_AGAIN_AFTER_S)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def run() -> int:
    try:
        settings = GatewaySettings.from_env()
        hide_environment("GPUFN_NATS_URL")
        fd_limit.allow_all()
        logging.basicConfig(
            level=settings.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of each malformed form of a client
        uvloop.run(main(settings))
    except BusUnavailable as error:
        log.error("%s", error)
        return 1
    except (InvalidSetting, NotProtected, PlatformError) as error:
        sys.stderr.write(f"{error}\n")  # the supervisor shows a process's last line
        return EXIT_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(run())
