"""A gateway on a real bus, without its process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from gpufn_core.ids import digest_of
from gpufn_core.protocol import subjects
from gpufn_core.protocol.reports import ControllerReport
from gpufn_gateway.app import App
from gpufn_gateway.audit.log import AuditLog
from gpufn_gateway.audit.request_audit import RequestAudit
from gpufn_gateway.auth.access import Access
from gpufn_gateway.auth.issuer import Fetcher
from gpufn_gateway.auth.key_use import KeyUse
from gpufn_gateway.auth.login import Login
from gpufn_gateway.auth.quota_sync import QuotaSync
from gpufn_gateway.auth.token_store import TokenStore
from gpufn_gateway.buckets import Buckets
from gpufn_gateway.builds.artifacts import Artifacts
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.builds.engines import Engines
from gpufn_gateway.builds.revision_activation import RevisionActivation
from gpufn_gateway.calls.call_bodies import CallBodies
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
from gpufn_gateway.console.sign_ins import SignIns
from gpufn_gateway.console.site import Site
from gpufn_gateway.console.tickets import Tickets
from gpufn_gateway.costs.budgets import Budgets
from gpufn_gateway.costs.ledger import Ledger
from gpufn_gateway.costs.price_file import PriceFile
from gpufn_gateway.data.dicts import Dicts
from gpufn_gateway.data.operations import Operations
from gpufn_gateway.data.queues import Queues
from gpufn_gateway.functions.deploy_checks import DeployChecks
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.splits import Splits
from gpufn_gateway.functions.variants import Variants
from gpufn_gateway.history.recorder import Recorder
from gpufn_gateway.history.sampler import Sampler
from gpufn_gateway.http.body_reader import BodyBudget, BodyReader
from gpufn_gateway.maps.maps import Maps
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.oip.inference import Inference
from gpufn_gateway.oip.shared_memory import regions as shared_memory
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
from gpufn_gateway.schedules.store import Schedules
from gpufn_gateway.secrets.secrets import Secrets
from gpufn_gateway.settings import GatewaySettings
from gpufn_gateway.signing.trusted_keys import TrustedKeys
from gpufn_gateway.store_sync import StoreSync
from gpufn_gateway.submitted.dead_letters import DeadLetters
from gpufn_gateway.submitted.submit import Submissions
from gpufn_gateway.teams.data_use import DataUse
from gpufn_gateway.teams.storage import TeamStorage
from gpufn_gateway.teams.team_use import TeamUses
from gpufn_gateway.terminals.records import TerminalRecords
from gpufn_gateway.terminals.terminals import Terminals
from gpufn_gateway.traces.store import TraceStore
from gpufn_gateway.volumes.volumes import Volumes
from gpufn_gateway.web.apps import WebApps
from gpufn_gateway.webhooks.address_policy import AddressPolicy
from gpufn_gateway.webhooks.secrets import WebhookSecrets
from gpufn_gateway.webhooks.sender import WebhookSender
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage import object_store, streams
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.queue import large_bodies as stored_bodies
from gpufn_platform.queue.caller import Caller
from gpufn_platform.secrets.master_key import KEY, MasterKey
from gpufn_platform.signing.local_trust import LocalTrust
from gpufn_platform.signing.signatures import Signatures
from gpufn_platform.volume_store.on_bus import BusStore

ARTIFACT_LIMIT = 8 << 20
VOLUME_LIMIT = 16 << 20
NO_HISTORY = Path("/nonexistent/history")


def bundle() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("app.py", "def embed(texts): return texts")
    return buffer.getvalue()


BUNDLE = bundle()
DIGEST = digest_of(BUNDLE)


class Whole:
    """A gateway on a bus, without its process. Tests share the buckets and use different names."""

    def __init__(
        self,
        bus: Bus,
        buckets: Buckets,
        name: str = "gw-test",
        shared_bodies: GatewaySharedBodies | None = None,
        *,
        master_key: MasterKey | None = None,
        settings: GatewaySettings | None = None,
        history: Path = NO_HISTORY,
        site: Path | None = None,
    ) -> None:
        self.clock = clock = SystemClock()
        self.bus = bus
        self.shared_bodies = shared_bodies
        self.buckets = buckets
        self.functions = buckets.functions
        self.revisions = buckets.revisions
        self.keys = buckets.keys
        self.access = Access(loopback=True, now=clock.time)
        self.token_store = TokenStore(buckets, self.access.tokens, clock)
        self.login = Login(settings or GatewaySettings(), self.access, self.token_store, clock, Fetcher())
        self.registry = Registry(clock, self.access)
        self.caller = Caller(bus, name=name, clock=clock)
        self.telemetry = telemetry = Telemetry(lambda: self.caller.pending)
        bodies = BodyReader(1 << 20, 30, what="a test", budget=BodyBudget(1 << 30))
        large = (
            BodyReader(64 << 20, 30, what="a test", budget=BodyBudget(1 << 30)) if shared_bodies is not None else bodies
        )
        call_bodies = CallBodies(bodies, large, shared_bodies)
        self.audit = AuditLog(bus, clock)
        self.key_use = KeyUse(buckets.key_use, self.access, clock)
        self.quotas = QuotaSync.connect(bus, buckets.usage, self.registry.teams, name, clock)
        addresses = AddressPolicy(("127.0.0.0/8", "::1/128"))
        disk = StoreSync(None, waits=False)
        self.sampler = Sampler(bus, self.registry, telemetry, clock, name)
        self.recorder = Recorder(bus, self.sampler, clock, name=name, folder=history)
        prices = PriceFile(Path(settings.prices) if settings is not None and settings.prices else None)
        self.ledger = Ledger(buckets.usage, self.recorder, self.registry, prices, clock)
        self.budgets = Budgets(self.ledger, self.registry, self.recorder, clock)
        self.traces = TraceStore()
        self.post = WebhookSender(addresses)
        self.webhook_secrets = WebhookSecrets(buckets.webhook_secrets)
        self.schedules = Schedules(bus, buckets.schedules, self.registry, clock)
        self.builds = Builds(bus, buckets.builds, clock)
        self.artifacts = Artifacts(bus)
        self.signatures = Signatures(buckets.signing, LocalTrust())
        storage = TeamStorage(bus, self.registry, DataUse(bus, buckets.dicts, clock))
        self.operations = Operations(Queues(bus), Dicts(buckets.dicts), storage)
        self.volumes = Volumes(BusStore(bus, purges=True), buckets.volumes, storage, clock, VOLUME_LIMIT)
        checks = DeployChecks(
            bus=bus,
            buckets=buckets,
            registry=self.registry,
            artifacts=self.artifacts,
            addresses=addresses,
            signatures=self.signatures,
            storage=storage,
            volumes=self.volumes,
        )
        self.deploys = Deploys(
            bus=bus, buckets=buckets, registry=self.registry, builds=self.builds, checks=checks, clock=clock
        )
        self.splits = Splits(registry=self.registry, deploys=self.deploys, clock=clock)
        mirrored = MirroredCalls(self.registry)
        mirrored.start(bus)
        self.variants = Variants(self.registry, self.deploys, clock)
        calls = Calls(
            bus=bus,
            queue=self.caller,
            registry=self.registry,
            access=self.access,
            telemetry=telemetry,
            bodies=call_bodies,
            clock=clock,
            quotas=self.quotas,
            variants=self.variants,
            shared_bodies=shared_bodies,
            stored_bodies=StoredBodies(bus, shared_bodies),
            check_budget=self.budgets.check,
        )
        submissions = self.submissions = Submissions(bus, calls, disk, addresses)
        team_uses = TeamUses(self.registry, self.quotas, storage)
        letters = DeadLetters(bus, calls)
        audit = RequestAudit(self.audit, self.access)
        self.terminal_records = TerminalRecords(self.registry, self.deploys, self.signatures, clock)
        self.terminals = Terminals(calls, self.terminal_records, audit)
        self.window = Window(telemetry, self.registry.totals.all)
        tickets = Tickets(self.access, self.token_store, clock)
        console_files = Site(site) if site else Site()
        pages = Pages(registry=self.registry, window=self.window, why_not_ready=self.registry.why_not_ready)
        regions = shared_memory.allowed_by(settings or GatewaySettings())
        routes = [
            *FunctionRoutes(
                bus=bus,
                registry=self.registry,
                deploys=self.deploys,
                builds=self.builds,
                splits=self.splits,
                variants=self.variants,
                submissions=submissions,
                bodies=bodies,
                bundle_bodies=bodies,
            ).routes(),
            *self.terminals.routes(),
            *ProfileRoutes(bus, self.registry, bodies, self.clock).routes(),
            *TrafficRoutes(self.registry, self.splits, mirrored, bodies).routes(),
            *AppRoutes(self.registry, self.deploys).routes(),
            *InvocationRoutes(submissions, self.registry).routes(),
            *MapRoutes(Maps(bus, calls, call_bodies, addresses), self.registry).routes(),
            *DeadLetterRoutes(letters, self.registry).routes(),
            *SecretRoutes(
                Secrets(buckets.secrets, master_key or MasterKey(KEY, ""), self.registry, self.deploys, clock), bodies
            ).routes(),
            *VolumeRoutes(self.volumes, bodies, ARTIFACT_LIMIT).routes(),
            *DataRoutes(bus, self.operations, bodies).routes(),
            *LoginRoutes(self.login, self.access, self.token_store, bodies).routes(),
            *TeamRoutes(buckets.teams, team_uses, self.registry, bodies).routes(),
            *SigningRoutes(TrustedKeys(buckets.signing, self.signatures, self.registry, clock), bodies).routes(),
            *ScheduleRoutes(self.schedules, calls, bodies).routes(),
            *WebhookRoutes(self.webhook_secrets, self.access).routes(),
            *ArtifactRoutes(self.artifacts, ARTIFACT_LIMIT).routes(),
            *BuildRoutes(bus=bus, builds=self.builds, artifacts=self.artifacts, bodies=bodies).routes(),
            *EngineRoutes(Engines(bus, buckets, self.registry, self.clock), bodies).routes(),
            *SharedMemoryRoutes(regions, self.access, bodies).routes(),
            *OipRoutes(
                self.registry, telemetry, self.registry.why_not_ready, deploys=self.deploys, bodies=bodies
            ).routes(),
            *AuditRoutes(self.audit).routes(),
            *HistoryRoutes(self.recorder, self.registry, clock).routes(),
            *AdviceRoutes(self.recorder, self.registry, clock).routes(),
            *TraceRoutes(self.traces, self.registry).routes(),
            *CostRoutes(self.ledger, self.budgets, self.registry, clock).routes(),
            *ConsoleRoutes(pages, Streams(clock.monotonic), tickets, self.registry, console_files).routes(),
            *UsageRoutes(buckets.usage, self.registry, clock).routes(),
            *NodeRoutes(registry=self.registry, drains=buckets.node_drains, clock=clock).routes(),
            *OperationRoutes(
                registry=self.registry,
                telemetry=telemetry,
                access=self.access,
                keys=buckets.keys,
                key_use=self.key_use,
                bodies=bodies,
                clock=clock,
                why_not_ready=self.registry.why_not_ready,
            ).routes(),
        ]
        invoke = Invoke(calls, submissions)
        inference = Inference(calls, invoke, call_bodies, regions)
        self.protocols = protocols = installed(
            Platform(
                calls,
                invoke,
                submissions,
                letters,
                webhook_secrets=self.webhook_secrets,
                files=ClientFiles(bus, buckets.client_files, clock),
                live=LiveItems(bus),
            )
        )
        web = WebApps(calls, invoke)
        sessions = Sessions(self.access, self.login, self.token_store)
        browser_login = BrowserLogin(self.login, self.access, self.token_store, clock, Fetcher().post)
        sign_ins = SignIns(self.access, sessions, tickets, bodies, audit=audit, browser_login=browser_login)
        console = Console(self.access, sessions, sign_ins, console_files)
        self.app = App(
            invoke,
            inference,
            self.access,
            routes,
            disk,
            audit=audit,
            protocols=protocols,
            web=web,
            terminals=self.terminals,
            console=console,
        )
        self.leads = True
        self.finishing = RevisionActivation(
            registry=self.registry, builds=self.builds, deploys=self.deploys, clock=clock, leads=lambda: self.leads
        )
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://127.0.0.1")

    @property
    def received_bytes(self) -> int:
        """Return the bytes received from the bus since we connected, as counted by the kernel."""
        assert self.bus._link is not None
        sock = self.bus._link._transport.get_extra_info("socket")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        return int.from_bytes(info[128:136], sys.byteorder)  # tcpi_bytes_received

    def report(self, *statuses: Any) -> None:
        self.registry.receive_controller_report(ControllerReport("c", 1, 0.0, statuses))


@contextlib.asynccontextmanager
async def gateway_on(
    nats: Any,
    name: str = "gw-test",
    folder: Path | None = None,
    master_key: MasterKey | None = None,
    settings: GatewaySettings | None = None,
    *,
    history: Path = NO_HISTORY,
    site: Path | None = None,
) -> AsyncIterator[Whole]:
    """Start a gateway. With a `folder` it accepts large bodies, which no runner on this host shares."""
    bus = await Bus.connect(nats.url, name="gateway")
    try:
        await streams.ensure_streams(bus)
        for bucket in (subjects.BUNDLES, subjects.MODEL_FILES, subjects.ENGINE_FILES, subjects.VOLUME_FILES):
            await object_store.ensure_bucket(bus, bucket)
        await stored_bodies.ensure_buckets(bus)
        shared_bodies = None
        if folder is not None:
            shared_bodies = GatewaySharedBodies(folder, name, budget=BodyBudget(1 << 30), reaches_all=lambda: False)
        whole = Whole(
            bus,
            await Buckets.open(bus),
            name,
            shared_bodies,
            master_key=master_key,
            settings=settings,
            history=history,
            site=site,
        )
        await whole.registry.start(bus, whole.buckets)
        await whole.signatures.start()
        await whole.token_store.start()
        await whole.builds.start()
        await whole.schedules.start()
        await whole.volumes.start()
        whole.caller.start()
        await whole.deploys.put_bundle(DIGEST, BUNDLE)
        audit_log = asyncio.create_task(whole.audit.run())
        async with whole.http:
            yield whole
        audit_log.cancel()
        await whole.recorder.close()
        whole.registry.stop()
        whole.signatures.stop()
        whole.token_store.stop()
        whole.builds.stop()
        whole.schedules.stop()
        whole.volumes.stop()
    finally:
        await bus.close()
