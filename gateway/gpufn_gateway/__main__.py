"""``python -m gpufn_gateway``: the gateway process. All of its objects are built here.

Startup   settings → connect to NATS and check the server → streams and buckets → registry → caller → application and
          background tasks → listen, and print the URL to stdout
Shutdown  1. stop listening and finish requests in flight (`stopping`)   2. the controller releases its lease
          3. ticks and watches stop   4. the NATS connection is closed
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop
from starlette.routing import Route

from gpufn_core.encoding.urls import is_loopback
from gpufn_core.errors import BusUnavailable, PlatformError
from gpufn_core.home import Home
from gpufn_core.ids import new_ulid
from gpufn_core.weights.credentials import OF_AWS
from gpufn_gateway.app import App
from gpufn_gateway.audit.log import AuditLog
from gpufn_gateway.audit.request_audit import RequestAudit
from gpufn_gateway.auth.access import Access, NotProtected
from gpufn_gateway.auth.issuer import Fetcher
from gpufn_gateway.auth.key_use import KeyUse
from gpufn_gateway.auth.login import Login
from gpufn_gateway.auth.quota_sync import QuotaSync
from gpufn_gateway.auth.token_store import TokenStore
from gpufn_gateway.buckets import Buckets
from gpufn_gateway.builds.artifacts import Artifacts
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.builds.engines import Engines
from gpufn_gateway.builds.orphaned_builds import OrphanedBuilds
from gpufn_gateway.builds.revision_activation import RevisionActivation
from gpufn_gateway.bus_setup import Storage
from gpufn_gateway.calls.fast_path import FastPath
from gpufn_gateway.calls.mirrored_calls import MirroredCalls
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_gateway.calls.stored_bodies import StoredBodies
from gpufn_gateway.console.browser_login import BrowserLogin
from gpufn_gateway.console.handler import Console
from gpufn_gateway.console.live.pages import Pages
from gpufn_gateway.console.live.stream import Streams
from gpufn_gateway.console.live.window import Window
from gpufn_gateway.console.routes import ConsoleRoutes
from gpufn_gateway.console.sessions import Sessions
from gpufn_gateway.console.site import Site
from gpufn_gateway.console.tickets import Tickets
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.loop import Controller
from gpufn_gateway.costs.budgets import Budgets
from gpufn_gateway.costs.ledger import Ledger
from gpufn_gateway.costs.price_file import PriceFile
from gpufn_gateway.data.dicts import Dicts
from gpufn_gateway.data.function_requests import FunctionRequests
from gpufn_gateway.data.operations import Operations
from gpufn_gateway.data.queues import Queues
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.lease_expiry import LeaseExpiry
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.splits import Splits
from gpufn_gateway.functions.traffic_return import TrafficReturn
from gpufn_gateway.functions.variant_requests import VariantRequests
from gpufn_gateway.functions.variants import Variants
from gpufn_gateway.garbage_collection.collector import GarbageCollector
from gpufn_gateway.graceful_shutdown import GracefulShutdown
from gpufn_gateway.history.recorder import Recorder
from gpufn_gateway.history.sampler import Sampler
from gpufn_gateway.http import request_id
from gpufn_gateway.http.body_reader import BodyBudget
from gpufn_gateway.http.body_readers import BodyReaders
from gpufn_gateway.http.connection.address_rate import AddressRate
from gpufn_gateway.http.connection.certificate import Certificate
from gpufn_gateway.http.connection.http2_tunnel import Http2, Http2Server
from gpufn_gateway.http.connection.server import Server, listen
from gpufn_gateway.maps.maps import Maps
from gpufn_gateway.metrics.bus_figures import BusFigures
from gpufn_gateway.metrics.gateway_series import GatewaySeries
from gpufn_gateway.metrics.gpus import GpuSeries
from gpufn_gateway.metrics.platform_series import PlatformSeries, ReportSeries
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.oip.inference import Inference
from gpufn_gateway.oip.shared_memory import regions as shared_memory
from gpufn_gateway.otlp.log_export import LogExport
from gpufn_gateway.protocols.client_files import ClientFiles
from gpufn_gateway.protocols.live_items import LiveItems
from gpufn_gateway.protocols.platform import Platform
from gpufn_gateway.protocols.registration import installed
from gpufn_gateway.routes.access.audit import AuditRoutes
from gpufn_gateway.routes.access.login import LoginRoutes
from gpufn_gateway.routes.access.secrets import SecretRoutes
from gpufn_gateway.routes.access.signing import SigningRoutes
from gpufn_gateway.routes.access.teams import TeamRoutes
from gpufn_gateway.routes.access.usage import UsageRoutes
from gpufn_gateway.routes.advice import AdviceRoutes
from gpufn_gateway.routes.calls.dead_letters import DeadLetterRoutes
from gpufn_gateway.routes.calls.invocations import InvocationRoutes
from gpufn_gateway.routes.calls.invoke import Invoke
from gpufn_gateway.routes.calls.maps import MapRoutes
from gpufn_gateway.routes.calls.oip import OipRoutes
from gpufn_gateway.routes.calls.shared_memory import SharedMemoryRoutes
from gpufn_gateway.routes.calls.webhooks import WebhookRoutes
from gpufn_gateway.routes.costs import CostRoutes
from gpufn_gateway.routes.data import DataRoutes
from gpufn_gateway.routes.functions.apps import AppRoutes
from gpufn_gateway.routes.functions.artifacts import ArtifactRoutes
from gpufn_gateway.routes.functions.builds import BuildRoutes
from gpufn_gateway.routes.functions.engines import EngineRoutes
from gpufn_gateway.routes.functions.functions import FunctionRoutes
from gpufn_gateway.routes.functions.schedules import ScheduleRoutes
from gpufn_gateway.routes.functions.traffic import TrafficRoutes
from gpufn_gateway.routes.history import HistoryRoutes
from gpufn_gateway.routes.nodes import NodeRoutes
from gpufn_gateway.routes.operations import OperationRoutes
from gpufn_gateway.routes.profiles import ProfileRoutes
from gpufn_gateway.routes.traces import TraceRoutes
from gpufn_gateway.routes.volumes import VolumeRoutes
from gpufn_gateway.schedules.runs import ScheduleRuns
from gpufn_gateway.schedules.store import Schedules
from gpufn_gateway.secrets.secrets import Secrets, check_master_key
from gpufn_gateway.settings import GatewaySettings
from gpufn_gateway.signing.trusted_keys import TrustedKeys
from gpufn_gateway.store_sync import StoreSync
from gpufn_gateway.submitted.dead_letters import DeadLetters
from gpufn_gateway.submitted.reaper import Reaper
from gpufn_gateway.submitted.submit import Submissions
from gpufn_gateway.teams.data_use import DataUse
from gpufn_gateway.teams.storage import TeamStorage
from gpufn_gateway.teams.team_use import TeamUses
from gpufn_gateway.terminals.records import TerminalRecords
from gpufn_gateway.terminals.terminals import Terminals
from gpufn_gateway.timers import tick
from gpufn_gateway.traces.setup import Traces
from gpufn_gateway.volumes.volumes import Volumes
from gpufn_gateway.web.apps import WebApps
from gpufn_gateway.webhooks.address_policy import AddressPolicy
from gpufn_gateway.webhooks.deliveries import Deliveries
from gpufn_gateway.webhooks.secrets import WebhookSecrets
from gpufn_gateway.webhooks.sender import WebhookSender
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.server_check import check_server
from gpufn_platform.bus.tls import BusTls
from gpufn_platform.process import fd_limit, grace_period
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.process.proc_hardening import hide_environment
from gpufn_platform.process.settings import EXIT_CONFIGURATION, InvalidSetting
from gpufn_platform.process.watchdog import notify_watchdog
from gpufn_platform.queue.caller import Caller
from gpufn_platform.secrets.master_key import KEY, MasterKey
from gpufn_platform.signing.local_trust import LocalTrust
from gpufn_platform.signing.signatures import Signatures
from gpufn_platform.volume_store.choose import volume_store

log = logging.getLogger("gpufn_gateway")

_BUS_CONNECT_TIMEOUT_S: Final = 30.0  # at startup; the supervisor starts the gateway and NATS together
# An election takes about 5 s, and so does each request during one. `gpufn up` waits for 60 s.
_ELECTION_TIMEOUT_S: Final = 45.0
_RETRY_DELAY_S: Final = 1.0


@dataclass(frozen=True)
class _Services:
    """Connections and stores that stay open until the process exits."""

    settings: GatewaySettings
    clock: SystemClock
    name: str
    bus: Bus
    storage: Storage
    buckets: Buckets
    master_key: MasterKey
    signatures: Signatures
    access: Access
    token_store: TokenStore
    login: Login
    registry: Registry
    builds: Builds
    schedules: Schedules
    storage_of_teams: TeamStorage
    volumes: Volumes
    caller: Caller
    fast_path: FastPath
    shared_bodies: GatewaySharedBodies


async def main(settings: GatewaySettings) -> None:
    notify_watchdog()
    certificate = Certificate(settings.tls_cert, settings.tls_key) if settings.tls_cert else None
    async with contextlib.AsyncExitStack() as stack:
        services = await _open_with_retry(settings, stack)
        gateway = _Gateway(services, certificate)
        listener = listen(settings)
        stack.callback(listener.close)
        shutdown = GracefulShutdown(
            services.caller,
            grace_s=lambda: grace_period.grace_s(Home.from_env(), settings.grace_s),
            requests_timeout_s=settings.shutdown_timeout_s,
        )
        app = gateway.app()
        http2 = _http2(app, services)
        if http2 is not None:
            stack.push_async_callback(http2.close)
        server = Server(app, settings, shutdown, certificate, http2)
        for name, task in gateway.background_tasks(server):
            stack.push_async_callback(_cancel, asyncio.create_task(task, name=name))
        stack.push_async_callback(_cancel, asyncio.create_task(server.announce(listener), name="announce"))
        await server.serve([listener])


async def _open_with_retry(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> _Services:
    """`_open`, retried while JetStream streams have no leader, for example while a NATS node is down.

    Raises BusUnavailable if no leader is elected in time, and the other exceptions of `_open`.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + _ELECTION_TIMEOUT_S
    while True:
        try:
            async with contextlib.AsyncExitStack() as attempt:
                services = await _open(settings, attempt)
                stack.push_async_callback(attempt.pop_all().aclose)
                return services
        except BusUnavailable as error:
            if loop.time() >= give_up_at:
                raise
            log.warning("the gateway cannot start yet and will retry: %s", error)
        await asyncio.sleep(_RETRY_DELAY_S)


async def _open(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> _Services:
    """Open the services; `stack` closes them. Raises BusUnavailable, NotProtected, PlatformError,
    InvalidSetting."""
    clock, name = SystemClock(), f"gw-{new_ulid()[-12:]}"
    bus = await Bus.connect(
        settings.nats_url, name=name, tls=BusTls.from_env(os.environ), retry_for_s=_BUS_CONNECT_TIMEOUT_S
    )
    stack.push_async_callback(bus.close)
    await check_server(bus)
    buckets = await Buckets.open(bus)
    storage = Storage(bus, buckets)
    await storage.ensure()
    home = Home.from_env()
    master_key = MasterKey.from_env(os.environ, home)
    await check_master_key(buckets.secrets, master_key)
    signatures = Signatures(buckets.signing, LocalTrust.from_env(os.environ))
    stack.callback(signatures.stop)
    await signatures.start()

    access = Access(
        loopback=is_loopback(settings.host),
        now=clock.time,
        hosts=settings.allowed_hosts,
        max_streams=settings.max_streams,
    )
    registry = Registry(clock, access)
    stack.callback(registry.stop)
    await registry.start(bus, buckets)
    access.check_protected(settings.host)
    token_store = TokenStore(buckets, access.tokens, clock)
    stack.callback(token_store.stop)
    await token_store.start()
    login = Login(settings, access, token_store, clock, _fetcher(settings))
    builds = Builds(bus, buckets.builds, clock)
    stack.callback(builds.stop)
    await builds.start()
    schedules = Schedules(bus, buckets.schedules, registry, clock)
    stack.callback(schedules.stop)
    await schedules.start()

    storage_of_teams = TeamStorage(bus, registry, DataUse(bus, buckets.dicts, clock))
    store = volume_store(settings.volume_store, os.environ, bus, clock)
    stack.push_async_callback(store.aclose)
    volumes = Volumes(store, buckets.volumes, storage_of_teams, clock, settings.max_volume_bytes)
    stack.callback(volumes.stop)
    await volumes.start()

    caller = Caller(bus, name=name, clock=clock)
    home.ensure()
    fast_path = FastPath(home.fast_path_socket, caller)
    stack.callback(fast_path.close)
    bodies = GatewaySharedBodies(
        home.claim_shared_bodies(),
        name,
        budget=BodyBudget(settings.max_shared_bodies_bytes),
        reaches_all=lambda: fast_path.is_connected and len(registry.live_nodes()) == 1,
    )
    bodies.open()
    stack.callback(bodies.close)
    caller.start(fast_path, shared_folder=bodies.folder, drop=bodies.remove)
    return _Services(
        settings, clock, name, bus, storage, buckets, master_key, signatures,
        access, token_store, login, registry, builds, schedules, storage_of_teams, volumes,
        caller, fast_path, bodies,
    )  # fmt: skip


def _fetcher(settings: GatewaySettings) -> Fetcher:
    """Raises InvalidSetting."""
    try:
        return Fetcher(settings.oidc_ca_file)
    except OSError as error:
        raise InvalidSetting(f"GPUFN_OIDC_CA_FILE={settings.oidc_ca_file}: {error.strerror or error}") from None


class _Gateway:
    """The application and the background tasks, built on the open services."""

    def __init__(self, services: _Services, certificate: Certificate | None) -> None:
        self._services = services
        bus, registry = services.bus, services.registry
        limits = Limits(share_across_domains=services.settings.share_across_domains)
        self._controller = Controller(bus, services.buckets, name=services.name, clock=services.clock, limits=limits)
        self._telemetry = Telemetry(lambda: services.caller.pending, self._controller.leads)
        self._readers = BodyReaders(services.settings, int(bus.server_info["max_payload"]), services.shared_bodies)
        self._quotas = QuotaSync.connect(
            bus, services.buckets.usage, services.registry.teams, services.name, services.clock
        )
        self._addresses = AddressPolicy(services.settings.webhook_networks)
        self._regions = shared_memory.allowed_by(services.settings)
        if self._regions is not None:
            registry.on_key_deleted.append(self._regions.forget)
        self._artifacts = Artifacts(bus)
        self._operations = Operations(Queues(bus), Dicts(services.buckets.dicts), services.storage_of_teams)
        self._team_uses = TeamUses(registry, self._quotas, services.storage_of_teams)
        self._deploys = Deploys(
            bus=bus,
            buckets=services.buckets,
            registry=registry,
            builds=services.builds,
            artifacts=self._artifacts,
            addresses=self._addresses,
            signatures=services.signatures,
            storage=services.storage_of_teams,
            volumes=services.volumes,
            clock=services.clock,
        )
        self._splits = Splits(registry=registry, deploys=self._deploys, clock=services.clock)
        self._mirrored = MirroredCalls(registry)
        self._mirrored.start(bus)
        self._variants = Variants(registry, self._deploys, services.clock)
        VariantRequests(bus, self._variants).start()
        self._traces = Traces.open(services.settings, bus, services.clock, services.name)
        if self._traces is not None:
            self._telemetry.of_gateway.append(self._traces.receiver)
            services.schedules.tracing = self._traces.tracing
            services.builds.on_change = self._traces.builds.follow
        self._log_export = LogExport.open(services.settings, bus)
        if self._log_export is not None:
            self._telemetry.of_gateway.append(self._log_export)
        self._calls = Calls(
            bus=bus,
            queue=services.caller,
            registry=registry,
            access=services.access,
            telemetry=self._telemetry,
            bodies=self._readers.for_calls,
            clock=services.clock,
            quotas=self._quotas,
            variants=self._variants,
            shared_bodies=services.shared_bodies,
            stored_bodies=StoredBodies(bus, services.shared_bodies),
            tracing=None if self._traces is None else self._traces.tracing,
        )
        self._webhook_secrets = WebhookSecrets(services.buckets.webhook_secrets)
        store = services.settings.nats_store
        self._disk = StoreSync(Path(store) if store else None, waits=services.settings.sync.waits)
        self._submissions = Submissions(bus, self._calls, self._disk, self._addresses)
        self._invoke = Invoke(self._calls, self._submissions)
        self._letters = DeadLetters(bus, self._calls)
        self._protocols = installed(
            Platform(
                self._calls,
                self._invoke,
                self._submissions,
                self._letters,
                webhook_secrets=self._webhook_secrets,
                files=ClientFiles(bus, services.buckets.client_files, services.clock),
                live=LiveItems(bus),
            )
        )
        self._audit = AuditLog(bus, services.clock)
        self._request_audit = RequestAudit(self._audit, services.access)
        self._terminals = Terminals(
            self._calls, TerminalRecords(registry, self._deploys, services.clock), self._request_audit
        )
        self._window = Window(self._telemetry, registry.totals.all)
        self._tickets = Tickets(services.access, services.token_store, services.clock)
        self._key_use = KeyUse(services.buckets.key_use, services.access, services.clock)
        sampler = Sampler(bus, registry, self._telemetry, services.clock, services.name)
        self._recorder = Recorder(bus, sampler, services.clock, name=services.name, folder=Home.from_env().history)
        prices = PriceFile(Path(services.settings.prices) if services.settings.prices else None)
        self._ledger = Ledger(services.buckets.usage, self._recorder, registry, prices, services.clock)
        self._budgets = Budgets(self._ledger, registry, self._recorder, services.clock)
        self._calls.check_budget = self._budgets.check
        self._bus_figures = BusFigures(
            bus,
            services.clock,
            leads=self._controller.leads,
            functions=lambda: registry.functions,
        )
        self._add_series(certificate)

    def _add_series(self, certificate: Certificate | None) -> None:
        services, registry, controller = self._services, self._services.registry, self._controller
        store = services.settings.nats_store
        self._telemetry.of_gateway.append(
            GatewaySeries(
                controller=controller,
                audit=self._audit,
                bus=services.bus,
                limits_used=self._quotas.limits_used,
                certificate_ends_at=lambda: None if certificate is None else certificate.ends_at,
                store=Path(store) if store else None,
            )
        )
        self._telemetry.of_platform += [
            PlatformSeries(
                controller=controller,
                registry=registry,
                builds=services.builds.known.values,
                clock=services.clock,
            ),
            ReportSeries(registry.live_nodes, registry.live_runners, registry.totals.all, registry.split_functions),
            GpuSeries(registry.live_nodes, registry.device_reports.of, registry.trends),
            self._bus_figures,
        ]

    def app(self) -> App:
        inference = Inference(self._calls, self._invoke, self._readers.for_calls, self._regions)
        rate = self._services.settings.max_requests_per_address
        return App(
            self._invoke,
            inference,
            self._services.access,
            self._routes(),
            self._disk,
            audit=self._request_audit,
            address_rate=AddressRate(rate) if rate else None,
            protocols=self._protocols,
            web=WebApps(self._calls, self._invoke),
            terminals=self._terminals,
            console=self._console(),
        )

    def _console(self) -> Console:
        access = self._services.access
        sessions = Sessions(access, self._services.login, self._services.token_store)
        services = self._services
        post = _fetcher(services.settings).post
        login = BrowserLogin(services.login, access, services.token_store, services.clock, post)
        return Console(
            access,
            sessions,
            self._tickets,
            self._readers.for_management,
            Site(),
            audit=self._request_audit,
            browser_login=login,
        )

    def _routes(self) -> list[Route]:
        services, bodies = self._services, self._readers.for_management
        bus, registry, builds, clock = services.bus, services.registry, services.builds, services.clock
        access, buckets = services.access, services.buckets
        return [
            *FunctionRoutes(
                bus=bus,
                registry=registry,
                deploys=self._deploys,
                builds=builds,
                splits=self._splits,
                variants=self._variants,
                submissions=self._submissions,
                bodies=bodies,
                bundle_bodies=self._readers.for_bundles,
            ).routes(),
            *self._terminals.routes(),
            *ProfileRoutes(bus, registry, bodies, services.clock).routes(),
            *TrafficRoutes(registry, self._splits, self._mirrored, bodies).routes(),
            *AppRoutes(registry, self._deploys).routes(),
            *InvocationRoutes(self._submissions, registry).routes(),
            *MapRoutes(Maps(bus, self._calls, self._readers.for_calls, self._addresses), registry).routes(),
            *DeadLetterRoutes(self._letters, registry).routes(),
            *ArtifactRoutes(self._artifacts, services.settings.max_model_bytes).routes(),
            *BuildRoutes(bus=bus, builds=builds, artifacts=self._artifacts, bodies=bodies).routes(),
            *WebhookRoutes(self._webhook_secrets, access).routes(),
            *SecretRoutes(
                Secrets(buckets.secrets, services.master_key, registry, self._deploys, clock), bodies
            ).routes(),
            *VolumeRoutes(services.volumes, bodies, services.settings.max_model_bytes).routes(),
            *DataRoutes(bus, self._operations, bodies).routes(),
            *LoginRoutes(services.login, access, services.token_store, self._readers.for_logins).routes(),
            *TeamRoutes(buckets.teams, self._team_uses, registry, bodies).routes(),
            *SigningRoutes(TrustedKeys(buckets.signing, services.signatures, registry, clock), bodies).routes(),
            *ScheduleRoutes(services.schedules, self._calls, bodies).routes(),
            *EngineRoutes(Engines(bus, buckets, registry, clock), bodies).routes(),
            *SharedMemoryRoutes(self._regions, access, bodies).routes(),
            *OipRoutes(
                registry,
                self._telemetry,
                self._why_not_ready,
                deploys=self._deploys,
                bodies=bodies,
                shares_memory=self._regions is not None,
            ).routes(),
            *AuditRoutes(self._audit).routes(),
            *HistoryRoutes(self._recorder, registry, clock).routes(),
            *AdviceRoutes(self._recorder, registry, clock).routes(),
            *TraceRoutes(None if self._traces is None else self._traces.store, registry).routes(),
            *CostRoutes(self._ledger, self._budgets, registry, clock).routes(),
            *ConsoleRoutes(
                Pages(registry=registry, window=self._window, why_not_ready=self._why_not_ready),
                Streams(clock.monotonic),
                self._tickets,
                registry,
            ).routes(),
            *UsageRoutes(buckets.usage, registry, clock).routes(),
            *NodeRoutes(registry=registry, drains=buckets.node_drains, clock=clock).routes(),
            *OperationRoutes(
                registry=registry,
                telemetry=self._telemetry,
                access=access,
                keys=buckets.keys,
                key_use=self._key_use,
                bodies=bodies,
                clock=clock,
                why_not_ready=self._why_not_ready,
            ).routes(),
        ]

    def _why_not_ready(self) -> str | None:
        if not self._services.bus.connected:
            return "the message bus is not connected"
        if not self._services.storage.is_ready:
            return "the queues are being created"
        if self._disk.is_full():
            return "the disk of the message bus is full"
        return self._services.registry.why_not_ready()

    def background_tasks(self, server: Server) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """Name and coroutine of each task that runs until it is cancelled."""
        services = self._services
        bus, registry, builds, clock = services.bus, services.registry, services.builds, services.clock
        controller = self._controller
        collection = GarbageCollector(
            bus=bus,
            buckets=services.buckets,
            registry=registry,
            builds=builds,
            volumes=services.volumes,
            in_use=lambda: controller.world.in_use(clock.monotonic()) if controller.leads() else None,
            kept_revisions=services.settings.kept_revisions,
            clock=clock,
        )
        registry.on_deleted += [self._telemetry.forget, collection.on_deleted]
        caller, fast_path, leads = services.caller, services.fast_path, controller.leads
        shared_bodies, invoke, quotas = services.shared_bodies, self._invoke, self._quotas
        yield "ticks", tick(caller, fast_path, shared_bodies, invoke=invoke, quotas=quotas, server=server, clock=clock)
        sync = self._disk.sync_records
        yield "data requests", FunctionRequests(bus, services.volumes, self._operations, sync).run()
        yield "quota sync", self._quotas.run()
        yield "audit log", self._audit.run()
        yield "key use", self._key_use.run()
        yield "console rates", self._window.run(clock)
        yield "controller", _run_controller(controller)
        yield "revision activation", RevisionActivation(registry, builds, self._deploys, clock, leads).run()
        yield "orphaned builds", OrphanedBuilds(bus, builds, registry, clock, leads).run()
        yield (
            "leases",
            LeaseExpiry(registry, self._deploys, self._audit, clock, leads=leads, in_use=collection.in_use).run(),
        )
        yield "traffic return", TrafficReturn(registry, self._splits, self._audit, leads=leads).run()
        yield "schedules", ScheduleRuns(services.schedules, registry, clock, self._disk, quotas, leads=leads).run()
        sender = WebhookSender(self._addresses)
        payloads = self._protocols.webhook_payloads()
        yield (
            "webhooks",
            Deliveries(
                bus,
                self._webhook_secrets,
                sender,
                clock,
                self._telemetry,
                payloads=payloads,
                team_of=registry.teams.name_of,
            ).run(),
        )
        yield "collection", collection.run()
        self._recorder.leads = leads
        yield "history", self._recorder.run()
        yield "budgets", self._budgets.run()
        yield "sizes of the bus", self._bus_figures.run()
        if self._traces is not None:
            self._traces.builds.leads = leads
            yield "traces", self._traces.receiver.run()
        if self._log_export is not None:
            yield "log export", self._log_export.run()
        yield "reaper", Reaper(bus, registry, clock, leads=leads).run()


def _http2(app: App, services: _Services) -> Http2 | None:
    """Return the connections to the gRPC server, or None if gRPC is not installed."""
    if importlib.util.find_spec("grpc") is None or importlib.util.find_spec("google.protobuf") is None:
        return None
    settings, path = services.settings, Home.from_env().run / f"{services.name}.grpc"

    def load() -> Callable[[], Http2Server]:
        from gpufn_gateway.oip.grpc.server import GrpcServer  # noqa: PLC0415  only for gateways with gRPC clients

        return lambda: GrpcServer(app, services.access, settings, path)

    return Http2(load, settings.grace_s + settings.shutdown_timeout_s)


async def _run_controller(controller: Controller) -> None:
    """Restart the controller after an unexpected error: the controller handles expected ones, and calls must go on."""
    while True:
        try:
            await controller.run()
        except Exception:
            log.exception("the controller failed; restarting it")
        await asyncio.sleep(_RETRY_DELAY_S)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def run() -> int:
    try:
        settings = GatewaySettings.from_env()
        hide_environment("GPUFN_NATS_URL", KEY, *OF_AWS)
        fd_limit.raise_to_hard_limit()
        lines = logging.StreamHandler(sys.stderr)
        lines.addFilter(request_id.add_to_record)
        logging.basicConfig(
            level=settings.log_level,
            handlers=[lines],
            format="%(asctime)s %(levelname)s %(name)s %(message)s%(request)s",
        )
        logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs a warning for each malformed form
        uvloop.run(main(settings))
    except BusUnavailable as error:
        log.error("%s", error)
        return 1
    except (InvalidSetting, NotProtected, PlatformError) as error:
        sys.stderr.write(f"{error}\n")  # the supervisor shows the last line of a process
        return EXIT_CONFIGURATION
    return 0


if __name__ == "__main__":
    sys.exit(run())
