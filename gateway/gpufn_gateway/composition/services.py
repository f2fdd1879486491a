"""Connections and stores of the gateway, opened in the order of their needs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Final

from gpufn_core.encoding.urls import is_loopback
from gpufn_core.errors import BusUnavailable
from gpufn_core.home import Home
from gpufn_core.ids import new_ulid
from gpufn_gateway.auth.access import Access
from gpufn_gateway.auth.issuer import Fetcher
from gpufn_gateway.auth.login import Login
from gpufn_gateway.auth.token_store import TokenStore
from gpufn_gateway.buckets import Buckets
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.bus_setup import Storage
from gpufn_gateway.calls.fast_path import FastPath
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.http.body_reader import BodyBudget
from gpufn_gateway.schedules.store import Schedules
from gpufn_gateway.secrets.secrets import check_master_key
from gpufn_gateway.settings import GatewaySettings
from gpufn_gateway.teams.data_use import DataUse
from gpufn_gateway.teams.storage import TeamStorage
from gpufn_gateway.volumes.volumes import Volumes
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.server_check import check_server
from gpufn_platform.bus.tls import BusTls
from gpufn_platform.process.clock import SystemClock
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.queue.caller import Caller
from gpufn_platform.secrets.master_key import MasterKey
from gpufn_platform.signing.local_trust import LocalTrust
from gpufn_platform.signing.signatures import Signatures
from gpufn_platform.volume_store.choose import volume_store

log = logging.getLogger("gpufn_gateway")

_BUS_CONNECT_TIMEOUT_S: Final = 30.0  # at startup; the supervisor starts the gateway and NATS together
# An election takes about 5 s, and so does each request during one. `gpufn up` waits for 60 s.
_ELECTION_TIMEOUT_S: Final = 45.0
_RETRY_DELAY_S: Final = 1.0


@dataclass(frozen=True)
class Services:
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
    issuers: Fetcher
    login: Login
    registry: Registry
    builds: Builds
    schedules: Schedules
    storage_of_teams: TeamStorage
    volumes: Volumes
    caller: Caller
    fast_path: FastPath
    shared_bodies: GatewaySharedBodies


async def open_with_retry(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> Services:
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


async def _open(settings: GatewaySettings, stack: contextlib.AsyncExitStack) -> Services:
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
    issuers = _fetcher(settings)
    login = Login(settings, access, token_store, clock, issuers)
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
    return Services(
        settings, clock, name, bus, storage, buckets, master_key, signatures,
        access, token_store, issuers, login, registry, builds, schedules, storage_of_teams, volumes,
        caller, fast_path, bodies,
    )  # fmt: skip


def _fetcher(settings: GatewaySettings) -> Fetcher:
    """Raises InvalidSetting."""
    try:
        return Fetcher(settings.oidc_ca_file)
    except OSError as error:
        raise InvalidSetting(f"GPUFN_OIDC_CA_FILE={settings.oidc_ca_file}: {error.strerror or error}") from None
