"""Tasks of the gateway that run until it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, Final

from gpufn_gateway.builds.orphaned_builds import OrphanedBuilds
from gpufn_gateway.builds.revision_activation import RevisionActivation
from gpufn_gateway.composition.parts import Parts
from gpufn_gateway.controller.loop import Controller
from gpufn_gateway.data.function_requests import FunctionRequests
from gpufn_gateway.functions.lease_expiry import LeaseExpiry
from gpufn_gateway.functions.traffic_return import TrafficReturn
from gpufn_gateway.garbage_collection.collector import GarbageCollector
from gpufn_gateway.http.connection.server import Server
from gpufn_gateway.schedules.runs import ScheduleRuns
from gpufn_gateway.submitted.reaper import Reaper
from gpufn_gateway.timers import tick
from gpufn_gateway.webhooks.deliveries import Deliveries
from gpufn_gateway.webhooks.sender import WebhookSender

log = logging.getLogger("gpufn_gateway")

_RETRY_DELAY_S: Final = 1.0  # after a failure of the controller


def background_tasks(parts: Parts, server: Server) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
    """Yield the name and the coroutine of each task. It runs until it is cancelled."""
    services = parts.services
    bus, registry, builds, clock = services.bus, services.registry, services.builds, services.clock
    controller = parts.controller
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
    registry.on_deleted += [parts.telemetry.forget, collection.on_deleted]
    caller, fast_path, leads = services.caller, services.fast_path, controller.leads
    shared_bodies, invoke, quotas = services.shared_bodies, parts.invoke, parts.quotas
    yield "ticks", tick(caller, fast_path, shared_bodies, invoke=invoke, quotas=quotas, server=server, clock=clock)
    sync = parts.disk.sync_records
    yield "data requests", FunctionRequests(bus, services.volumes, parts.operations, sync).run()
    yield "quota sync", parts.quotas.run()
    yield "audit log", parts.audit.run()
    yield "key use", parts.key_use.run()
    yield "console rates", parts.window.run(clock)
    yield "controller", _run_controller(controller)
    yield "revision activation", RevisionActivation(registry, builds, parts.deploys, clock, leads).run()
    yield "orphaned builds", OrphanedBuilds(bus, builds, registry, clock, leads).run()
    yield (
        "leases",
        LeaseExpiry(registry, parts.deploys, parts.audit, clock, leads=leads, in_use=collection.in_use).run(),
    )
    yield "traffic return", TrafficReturn(registry, parts.splits, parts.audit, leads=leads).run()
    yield "schedules", ScheduleRuns(services.schedules, registry, clock, parts.disk, quotas, leads=leads).run()
    sender = WebhookSender(parts.addresses)
    payloads = parts.protocols.webhook_payloads()
    yield (
        "webhooks",
        Deliveries(
            bus,
            parts.webhook_secrets,
            sender,
            clock,
            parts.telemetry,
            payloads=payloads,
            team_of=registry.teams.name_of,
        ).run(),
    )
    yield "index of calls", parts.submissions.indexing.run()
    yield "collection", collection.run()
    parts.recorder.leads = leads
    yield "history", parts.recorder.run()
    yield "budgets", parts.budgets.run()
    yield "sizes of the bus", parts.bus_figures.run()
    if parts.traces is not None:
        parts.traces.builds.leads = leads
        yield "traces", parts.traces.receiver.run()
    if parts.log_export is not None:
        yield "log export", parts.log_export.run()
    yield "reaper", Reaper(bus, registry, clock, leads=leads).run()


async def _run_controller(controller: Controller) -> None:
    """Restart the controller after an unexpected error: the controller handles expected ones, and calls must go on."""
    while True:
        try:
            await controller.run()
        except Exception:
            log.exception("the controller failed; restarting it")
        await asyncio.sleep(_RETRY_DELAY_S)
