"""Objects of the gateway, built on its open services."""

from __future__ import annotations

from pathlib import Path

from gpufn_core.home import Home
from gpufn_gateway.audit.log import AuditLog
from gpufn_gateway.audit.request_audit import RequestAudit
from gpufn_gateway.auth.key_use import KeyUse
from gpufn_gateway.auth.quota_sync import QuotaSync
from gpufn_gateway.builds.artifacts import Artifacts
from gpufn_gateway.calls.mirrored_calls import MirroredCalls
from gpufn_gateway.calls.prepare import Calls
from gpufn_gateway.calls.stored_bodies import StoredBodies
from gpufn_gateway.composition.services import Services
from gpufn_gateway.console.live.window import Window
from gpufn_gateway.console.site import Site
from gpufn_gateway.console.tickets import Tickets
from gpufn_gateway.controller.limits import Limits
from gpufn_gateway.controller.loop import Controller
from gpufn_gateway.costs.budgets import Budgets
from gpufn_gateway.costs.ledger import Ledger
from gpufn_gateway.costs.price_file import PriceFile
from gpufn_gateway.data.dicts import Dicts
from gpufn_gateway.data.operations import Operations
from gpufn_gateway.data.queues import Queues
from gpufn_gateway.functions.deploy_checks import DeployChecks
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.splits import Splits
from gpufn_gateway.functions.variant_requests import VariantRequests
from gpufn_gateway.functions.variants import Variants
from gpufn_gateway.history.recorder import Recorder
from gpufn_gateway.history.sampler import Sampler
from gpufn_gateway.http.body_readers import BodyReaders
from gpufn_gateway.http.connection.certificate import Certificate
from gpufn_gateway.metrics.bus_figures import BusFigures
from gpufn_gateway.metrics.gateway_series import GatewaySeries
from gpufn_gateway.metrics.gpus import GpuSeries
from gpufn_gateway.metrics.platform_series import PlatformSeries, ReportSeries
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.oip.shared_memory import regions as shared_memory
from gpufn_gateway.otlp.log_export import LogExport
from gpufn_gateway.protocols.client_files import ClientFiles
from gpufn_gateway.protocols.live_items import LiveItems
from gpufn_gateway.protocols.platform import Platform
from gpufn_gateway.protocols.registration import installed
from gpufn_gateway.routes.calls.invoke import Invoke
from gpufn_gateway.store_sync import StoreSync
from gpufn_gateway.submitted.dead_letters import DeadLetters
from gpufn_gateway.submitted.submit import Submissions
from gpufn_gateway.teams.team_use import TeamUses
from gpufn_gateway.terminals.records import TerminalRecords
from gpufn_gateway.terminals.terminals import Terminals
from gpufn_gateway.traces.setup import Traces
from gpufn_gateway.webhooks.address_policy import AddressPolicy
from gpufn_gateway.webhooks.secrets import WebhookSecrets


class Parts:
    """Objects that routes, the application and background tasks share."""

    def __init__(self, services: Services, certificate: Certificate | None) -> None:
        self.services = services
        bus, registry = services.bus, services.registry
        limits = Limits(share_across_domains=services.settings.share_across_domains)
        self.controller = Controller(bus, services.buckets, name=services.name, clock=services.clock, limits=limits)
        self.telemetry = Telemetry(lambda: services.caller.pending, self.controller.leads)
        self.readers = BodyReaders(services.settings, int(bus.server_info["max_payload"]), services.shared_bodies)
        self.quotas = QuotaSync.connect(
            bus, services.buckets.usage, services.registry.teams, services.name, services.clock
        )
        self.addresses = AddressPolicy(services.settings.webhook_networks)
        self.regions = shared_memory.allowed_by(services.settings)
        if self.regions is not None:
            registry.on_key_deleted.append(self.regions.forget)
        self.artifacts = Artifacts(bus)
        self.operations = Operations(Queues(bus), Dicts(services.buckets.dicts), services.storage_of_teams)
        self.team_uses = TeamUses(registry, self.quotas, services.storage_of_teams)
        self.deploys = Deploys(
            bus=bus,
            buckets=services.buckets,
            registry=registry,
            builds=services.builds,
            checks=DeployChecks(
                bus=bus,
                buckets=services.buckets,
                registry=registry,
                artifacts=self.artifacts,
                addresses=self.addresses,
                signatures=services.signatures,
                storage=services.storage_of_teams,
                volumes=services.volumes,
            ),
            clock=services.clock,
        )
        self.splits = Splits(registry=registry, deploys=self.deploys, clock=services.clock)
        self.mirrored = MirroredCalls(registry)
        self.mirrored.start(bus)
        self.variants = Variants(registry, self.deploys, services.clock)
        VariantRequests(bus, self.variants).start()
        self.traces = Traces.open(services.settings, bus, services.clock, services.name)
        if self.traces is not None:
            self.telemetry.of_gateway.append(self.traces.receiver)
            services.schedules.tracing = self.traces.tracing
            services.builds.on_change = self.traces.builds.follow
        self.log_export = LogExport.open(services.settings, bus)
        if self.log_export is not None:
            self.telemetry.of_gateway.append(self.log_export)
        self.calls = Calls(
            bus=bus,
            queue=services.caller,
            registry=registry,
            access=services.access,
            telemetry=self.telemetry,
            bodies=self.readers.for_calls,
            clock=services.clock,
            quotas=self.quotas,
            variants=self.variants,
            shared_bodies=services.shared_bodies,
            stored_bodies=StoredBodies(bus, services.shared_bodies),
            tracing=None if self.traces is None else self.traces.tracing,
        )
        self.webhook_secrets = WebhookSecrets(services.buckets.webhook_secrets)
        store = services.settings.nats_store
        self.disk = StoreSync(Path(store) if store else None, waits=services.settings.sync.waits)
        self.submissions = Submissions(bus, self.calls, self.disk, self.addresses)
        self.invoke = Invoke(self.calls, self.submissions)
        self.letters = DeadLetters(bus, self.calls)
        self.protocols = installed(
            Platform(
                self.calls,
                self.invoke,
                self.submissions,
                self.letters,
                webhook_secrets=self.webhook_secrets,
                files=ClientFiles(bus, services.buckets.client_files, services.clock),
                live=LiveItems(bus),
            )
        )
        self.audit = AuditLog(bus, services.clock)
        self.request_audit = RequestAudit(self.audit, services.access)
        self.terminals = Terminals(
            self.calls,
            TerminalRecords(registry, self.deploys, services.signatures, services.clock),
            self.request_audit,
        )
        self.window = Window(self.telemetry, registry.totals.all)
        self.site = Site()
        self.tickets = Tickets(services.access, services.token_store, services.clock)
        self.key_use = KeyUse(services.buckets.key_use, services.access, services.clock)
        self.recorder = Recorder(
            bus,
            Sampler(bus, registry, self.telemetry, services.clock, services.name),
            services.clock,
            name=services.name,
            folder=Home.from_env().history,
        )
        prices = PriceFile(Path(services.settings.prices) if services.settings.prices else None)
        self.ledger = Ledger(services.buckets.usage, self.recorder, registry, prices, services.clock)
        self.budgets = Budgets(self.ledger, registry, self.recorder, services.clock)
        self.calls.check_budget = self.budgets.check
        self.bus_figures = BusFigures(
            bus,
            services.clock,
            leads=self.controller.leads,
            functions=lambda: registry.functions,
        )
        self._add_series(certificate)

    def _add_series(self, certificate: Certificate | None) -> None:
        services, registry, controller = self.services, self.services.registry, self.controller
        store = services.settings.nats_store
        self.telemetry.of_gateway.append(
            GatewaySeries(
                controller=controller,
                audit=self.audit,
                bus=services.bus,
                limits_used=self.quotas.limits_used,
                certificate_ends_at=lambda: None if certificate is None else certificate.ends_at,
                store=Path(store) if store else None,
            )
        )
        self.telemetry.of_platform += [
            PlatformSeries(
                controller=controller,
                registry=registry,
                builds=services.builds.known.values,
                clock=services.clock,
            ),
            ReportSeries(registry.live_nodes, registry.live_runners, registry.totals.all, registry.split_functions),
            GpuSeries(registry.live_nodes, registry.device_reports.of, registry.trends),
            self.bus_figures,
        ]

    def why_not_ready(self) -> str | None:
        if not self.services.bus.connected:
            return "the message bus is not connected"
        if not self.services.storage.is_ready:
            return "the queues are being created"
        if self.disk.is_full():
            return "the disk of the message bus is full"
        return self.services.registry.why_not_ready()
