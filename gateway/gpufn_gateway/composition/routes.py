"""Routes of the management API and the protocols."""

from __future__ import annotations

from starlette.routing import Route

from gpufn_gateway.builds.engines import Engines
from gpufn_gateway.composition.parts import Parts
from gpufn_gateway.console.live.pages import Pages
from gpufn_gateway.console.live.stream import Streams
from gpufn_gateway.console.routes import ConsoleRoutes
from gpufn_gateway.maps.maps import Maps
from gpufn_gateway.routes.access.audit import AuditRoutes
from gpufn_gateway.routes.access.login import LoginRoutes
from gpufn_gateway.routes.access.secrets import SecretRoutes
from gpufn_gateway.routes.access.signing import SigningRoutes
from gpufn_gateway.routes.access.teams import TeamRoutes
from gpufn_gateway.routes.access.usage import UsageRoutes
from gpufn_gateway.routes.advice import AdviceRoutes
from gpufn_gateway.routes.calls.dead_letters import DeadLetterRoutes
from gpufn_gateway.routes.calls.invocations import InvocationRoutes
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
from gpufn_gateway.secrets.secrets import Secrets
from gpufn_gateway.signing.trusted_keys import TrustedKeys


def all_routes(parts: Parts) -> list[Route]:
    services, bodies = parts.services, parts.readers.for_management
    bus, registry, builds, clock = services.bus, services.registry, services.builds, services.clock
    access, buckets = services.access, services.buckets
    return [
        *FunctionRoutes(
            bus=bus,
            registry=registry,
            deploys=parts.deploys,
            builds=builds,
            splits=parts.splits,
            variants=parts.variants,
            submissions=parts.submissions,
            bodies=bodies,
            bundle_bodies=parts.readers.for_bundles,
        ).routes(),
        *parts.terminals.routes(),
        *ProfileRoutes(bus, registry, bodies, services.clock).routes(),
        *TrafficRoutes(registry, parts.splits, parts.mirrored, bodies).routes(),
        *AppRoutes(registry, parts.deploys).routes(),
        *InvocationRoutes(parts.submissions, registry).routes(),
        *MapRoutes(Maps(bus, parts.calls, parts.readers.for_calls, parts.addresses), registry).routes(),
        *DeadLetterRoutes(parts.letters, registry).routes(),
        *ArtifactRoutes(parts.artifacts, services.settings.max_model_bytes).routes(),
        *BuildRoutes(bus=bus, builds=builds, artifacts=parts.artifacts, bodies=bodies).routes(),
        *WebhookRoutes(parts.webhook_secrets, access).routes(),
        *SecretRoutes(Secrets(buckets.secrets, services.master_key, registry, parts.deploys, clock), bodies).routes(),
        *VolumeRoutes(services.volumes, bodies, services.settings.max_model_bytes).routes(),
        *DataRoutes(bus, parts.operations, bodies).routes(),
        *LoginRoutes(services.login, access, services.token_store, parts.readers.for_logins).routes(),
        *TeamRoutes(buckets.teams, parts.team_uses, registry, bodies).routes(),
        *SigningRoutes(TrustedKeys(buckets.signing, services.signatures, registry, clock), bodies).routes(),
        *ScheduleRoutes(services.schedules, parts.calls, bodies).routes(),
        *EngineRoutes(Engines(bus, buckets, registry, clock), bodies).routes(),
        *SharedMemoryRoutes(parts.regions, access, bodies).routes(),
        *OipRoutes(
            registry,
            parts.telemetry,
            parts.why_not_ready,
            deploys=parts.deploys,
            bodies=bodies,
            shares_memory=parts.regions is not None,
        ).routes(),
        *AuditRoutes(parts.audit).routes(),
        *HistoryRoutes(parts.recorder, registry, clock).routes(),
        *AdviceRoutes(parts.recorder, registry, clock).routes(),
        *TraceRoutes(None if parts.traces is None else parts.traces.store, registry).routes(),
        *CostRoutes(parts.ledger, parts.budgets, registry, clock).routes(),
        *ConsoleRoutes(
            Pages(registry=registry, window=parts.window, why_not_ready=parts.why_not_ready),
            Streams(clock.monotonic),
            parts.tickets,
            registry,
            parts.site,
        ).routes(),
        *UsageRoutes(buckets.usage, registry, clock).routes(),
        *NodeRoutes(registry=registry, drains=buckets.node_drains, clock=clock).routes(),
        *OperationRoutes(
            registry=registry,
            telemetry=parts.telemetry,
            access=access,
            keys=buckets.keys,
            key_use=parts.key_use,
            bodies=bodies,
            clock=clock,
            why_not_ready=parts.why_not_ready,
        ).routes(),
    ]
