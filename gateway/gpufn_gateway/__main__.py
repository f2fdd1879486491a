"""``python -m gpufn_gateway``: the gateway process, put together here and nowhere else.

Start     settings → bus, and whether we can run on it → streams and buckets → registry → caller → controller → listen,
          and say where on stdout
Shutdown  1. stop listening; calls in flight get `shutdown_timeout_s`   2. the controller gives up its lease
          3. ticks and watches stop   4. the bus is closed
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Final

import uvicorn
import uvloop

from gpufn.bus import objects, streams
from gpufn.bus.calls import Caller
from gpufn.bus.connection import Bus
from gpufn.bus.selfcheck import check_server
from gpufn.clock import SystemClock
from gpufn.errors import BusUnavailable, GpufnError, PlatformError
from gpufn.exits import EXIT_CONFIGURATION
from gpufn.home import Home
from gpufn.ids import new_ulid
from gpufn.protocol import subjects
from gpufn.secrecy import hide_environment
from gpufn.settings import InvalidSetting
from gpufn_gateway import protocol
from gpufn_gateway.app import App
from gpufn_gateway.artifacts import Artifacts
from gpufn_gateway.auth import Access, NotProtected, is_loopback
from gpufn_gateway.bodies import BodyBudget, BodyReader
from gpufn_gateway.buckets import Buckets
from gpufn_gateway.builds import Builds
from gpufn_gateway.call_bodies import CallBodies
from gpufn_gateway.calls import Calls
from gpufn_gateway.collection import Collection
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.loop import Controller
from gpufn_gateway.dead_letters import DeadLetters
from gpufn_gateway.deploys import Deploys
from gpufn_gateway.engines import Engines
from gpufn_gateway.finishing import Finishing
from gpufn_gateway.invoke import Invoke
from gpufn_gateway.lane import Lane
from gpufn_gateway.oip import Inference
from gpufn_gateway.parcels import GatewayParcels
from gpufn_gateway.reaper import Reaper
from gpufn_gateway.registry import Registry
from gpufn_gateway.routes.artifacts import ArtifactRoutes
from gpufn_gateway.routes.builds import BuildRoutes
from gpufn_gateway.routes.dead_letters import DeadLetterRoutes
from gpufn_gateway.routes.engines import EngineRoutes
from gpufn_gateway.routes.functions import FunctionRoutes
from gpufn_gateway.routes.invocations import InvocationRoutes
from gpufn_gateway.routes.oip import OipRoutes
from gpufn_gateway.routes.operations import OperationRoutes
from gpufn_gateway.routes.schedules import ScheduleRoutes
from gpufn_gateway.routes.webhooks import WebhookRoutes
from gpufn_gateway.schedules.runs import ScheduleRuns
from gpufn_gateway.schedules.store import Schedules
from gpufn_gateway.settings import GatewaySettings
from gpufn_gateway.submit import Submissions
from gpufn_gateway.telemetry import Telemetry
from gpufn_gateway.webhooks.addresses import Addresses
from gpufn_gateway.webhooks.deliveries import Deliveries
from gpufn_gateway.webhooks.post import Post
from gpufn_gateway.webhooks.secrets import WebhookSecrets

log = logging.getLogger("gpufn_gateway")

_BUS_PATIENCE_S: Final = 30.0  # at start; the supervisor starts us together with the bus
_BUS_RETRY_S: Final = 0.25
_TICK_S: Final = 0.1
_SWEEP_PARCELS_BEATS: Final = 600
_MANAGE_BYTES: Final = 4 << 20  # a deploy's spec, with its schemas


class _Server(uvicorn.Server):
    """uvicorn, without its hands on our signals: it would end the process before the rest is shut down."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Storage:
    """The streams and buckets on the bus, made again whenever the bus comes back without them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._task: asyncio.Task[None] | None = None
        self.is_ready = False
        bus.on_reconnect(self._on_reconnect)

    async def ensure(self) -> None:
        await streams.ensure_streams(self._bus)
        for bucket in (subjects.BUNDLES, subjects.MODEL_FILES, subjects.ENGINE_FILES):
            await objects.ensure_bucket(self._bus, bucket)
        await objects.ensure_bucket(self._bus, subjects.RESULT_FILES, expires=True)
        self.is_ready = True

    def _on_reconnect(self) -> None:
        self.is_ready = False
        self._task = asyncio.ensure_future(self._again())

    async def _again(self) -> None:
        while not self.is_ready and self._bus.connected:
            try:
                await self.ensure()
            except GpufnError as error:
                log.warning("the streams could not be made yet: %s", error)
                await asyncio.sleep(_BUS_RETRY_S)


class _Bodies:
    """How much of a request is read into memory, by what it is; all of them share one budget."""

    def __init__(self, settings: GatewaySettings, max_payload: int, parcels: GatewayParcels) -> None:
        timeout_s, budget = settings.body_timeout_s, BodyBudget(settings.max_bodies_bytes)
        call_bytes = settings.max_call_bytes(max_payload)
        bundle_bytes = settings.max_body_bytes
        manage_bytes = min(_MANAGE_BYTES, bundle_bytes)
        inline = BodyReader(call_bytes, timeout_s, what="a call's arguments", budget=budget)
        large = BodyReader(settings.max_body_bytes, timeout_s, what="a call's arguments", budget=budget)
        self.of_calls = CallBodies(inline, large, parcels)
        self.of_bundles = BodyReader(bundle_bytes, timeout_s * 10, what="a bundle", budget=budget)
        self.of_management = BodyReader(manage_bytes, timeout_s, what="this request", budget=budget)


async def main(settings: GatewaySettings) -> None:
    clock = SystemClock()
    name = f"gw-{new_ulid()[-12:]}"
    bus = await _connect(settings.nats_url, name)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(bus.close)
        await check_server(bus)
        storage = Storage(bus)
        await storage.ensure()
        buckets = await Buckets.open(bus)

        access = Access(loopback=is_loopback(settings.host))
        registry = Registry(clock, access)
        stack.callback(registry.stop)
        await registry.start(bus, buckets)
        builds = Builds(bus, buckets.builds, clock)
        stack.callback(builds.stop)
        await builds.start()
        access.check_protected(settings.host)
        listener = _listen(settings)
        stack.callback(listener.close)

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
        telemetry = Telemetry(lambda: caller.pending, registry.live_runners)
        bodies = _Bodies(settings, int(bus.server_info["max_payload"]), parcels)
        calls = Calls(
            bus=bus,
            queue=caller,
            registry=registry,
            access=access,
            telemetry=telemetry,
            bodies=bodies.of_calls,
            clock=clock,
            parcels=parcels,
        )
        addresses = Addresses(settings.webhook_networks)
        submissions = Submissions(bus, calls, addresses)
        invoke = Invoke(calls, submissions)
        webhook_secrets = WebhookSecrets(buckets.webhook_secrets)
        schedules = await Schedules.open(bus, buckets.schedules, registry, clock)
        stack.callback(schedules.stop)
        artifacts = Artifacts(bus)
        deploys = Deploys(
            bus, buckets, registry=registry, builds=builds, artifacts=artifacts, addresses=addresses, clock=clock
        )

        why_not_ready = functools.partial(_why_not_ready, bus, storage, registry)

        routes = [
            *FunctionRoutes(
                bus=bus,
                registry=registry,
                deploys=deploys,
                builds=builds,
                submissions=submissions,
                bodies=bodies.of_management,
                bundle_bodies=bodies.of_bundles,
            ).routes(),
            *InvocationRoutes(submissions).routes(),
            *DeadLetterRoutes(DeadLetters(bus, registry, clock)).routes(),
            *ArtifactRoutes(artifacts, settings.max_model_bytes).routes(),
            *BuildRoutes(bus=bus, builds=builds, artifacts=artifacts, bodies=bodies.of_management).routes(),
            *WebhookRoutes(webhook_secrets, access).routes(),
            *ScheduleRoutes(schedules, registry, bodies.of_management, clock).routes(),
            *EngineRoutes(Engines(bus, buckets.engines, registry, builds), bodies.of_management).routes(),
            *OipRoutes(registry, telemetry, why_not_ready).routes(),
            *OperationRoutes(
                registry=registry,
                counters=telemetry,
                access=access,
                keys=buckets.keys,
                bodies=bodies.of_management,
                clock=clock,
                why_not_ready=why_not_ready,
            ).routes(),
        ]
        app = App(invoke, Inference(calls, invoke, bodies.of_calls), access, routes)
        server = _Server(_uvicorn_config(app, settings))
        _stop_on_signals(server)

        controller = Controller(
            bus,
            functions=buckets.functions,
            revisions=buckets.revisions,
            assignments=buckets.assignments,
            leases=buckets.leases,
            name=name,
            clock=clock,
            limits=Limits(share_across_domains=settings.share_across_domains),
        )
        finishing = Finishing(
            registry=registry, builds=builds, deploys=deploys, clock=clock, leads=lambda: controller.leads
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
        registry.on_deleted += [telemetry.forget, collection.on_deleted]
        for doing, what in (
            (_tick(caller=caller, lane=lane, parcels=parcels, invoke=invoke, server=server, clock=clock), "ticks"),
            (_control(controller), "controller"),
            (finishing.run(), "finishing"),
            (ScheduleRuns(schedules, registry, clock, leads=lambda: controller.leads).run(), "schedules"),
            (Deliveries(bus, webhook_secrets, Post(addresses), clock).run(), "webhooks"),
            (collection.run(), "collection"),
            (Reaper(bus, registry, clock, leads=lambda: controller.leads).run(), "reaper"),
            (_announce(server, listener), "announce"),
        ):
            stack.push_async_callback(_cancel, asyncio.create_task(doing, name=what))
        await server.serve([listener])


def _why_not_ready(bus: Bus, storage: Storage, registry: Registry) -> str | None:
    if not bus.connected:
        return "the message bus is not connected"
    if not storage.is_ready:
        return "the queues are being made"
    return registry.why_not_ready()


async def _connect(url: str, name: str) -> Bus:
    loop = asyncio.get_running_loop()
    give_up = loop.time() + _BUS_PATIENCE_S
    while True:
        try:
            return await Bus.connect(url, name=name)
        except BusUnavailable as error:
            if loop.time() >= give_up:
                raise
            log.info("waiting for the bus: %s", error)
            await asyncio.sleep(_BUS_RETRY_S)


def _listen(settings: GatewaySettings) -> socket.socket:
    try:
        return socket.create_server(
            (settings.host, settings.port),
            family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET,
            backlog=2048,
        )
    except OSError as error:
        raise InvalidSetting(
            f"cannot listen on GPUFN_HOST={settings.host} GPUFN_PORT={settings.port}: {error.strerror}"
        ) from error


def _uvicorn_config(app: App, settings: GatewaySettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol.GuardedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=int(settings.shutdown_timeout_s),
    )


def _stop_on_signals(server: uvicorn.Server) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


async def _tick(
    *, caller: Caller, lane: Lane, parcels: GatewayParcels, invoke: Invoke, server: uvicorn.Server, clock: SystemClock
) -> None:
    loop = asyncio.get_running_loop()
    beat = 0
    while True:
        await asyncio.sleep(_TICK_S)
        beat += 1
        now = clock.monotonic()
        try:
            invoke.tick(now)
            if beat % 3 == 0:
                caller.tick(now)
            if beat % 10 == 0:
                lane.tick(loop.time())
                protocol.sweep(list(server.server_state.connections), loop.time())
            if beat % _SWEEP_PARCELS_BEATS == 0:
                parcels.sweep()
        except Exception:
            log.exception("a tick failed; the next one goes on")


async def _control(controller: Controller) -> None:
    """The controller classifies its own failures; one that gets here is a defect, and calls must go on without it."""
    while True:
        try:
            await controller.run()
        except Exception:
            log.exception("the controller failed; it starts again")
        await asyncio.sleep(1.0)


async def _announce(server: uvicorn.Server, listener: socket.socket) -> None:
    while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.005)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if ipaddress.ip_address(host).is_unspecified:
        shown = "127.0.0.1"
    sys.stdout.write(json.dumps({"event": "listening", "url": f"http://{shown}:{port}"}) + "\n")
    sys.stdout.flush()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def run() -> int:
    try:
        settings = GatewaySettings.from_env()
    except InvalidSetting as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIGURATION
    hide_environment("GPUFN_NATS_URL")
    logging.basicConfig(
        level=settings.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        uvloop.run(main(settings))
    except BusUnavailable as error:
        log.error("%s", error)
        return 1
    except (InvalidSetting, NotProtected, PlatformError) as error:
        log.error("%s", error)
        return EXIT_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(run())
