"""The ASGI application of the gateway, with the console and gRPC."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from gpufn_core.home import Home
from gpufn_gateway.app import App
from gpufn_gateway.composition.parts import Parts
from gpufn_gateway.composition.routes import all_routes
from gpufn_gateway.composition.services import Services
from gpufn_gateway.console.browser_login import BrowserLogin
from gpufn_gateway.console.handler import Console
from gpufn_gateway.console.sessions import Sessions
from gpufn_gateway.console.sign_ins import SignIns
from gpufn_gateway.http.connection.address_rate import AddressRate
from gpufn_gateway.http.connection.http2_tunnel import Http2, Http2Server
from gpufn_gateway.oip.inference import Inference
from gpufn_gateway.web.apps import WebApps


def application(parts: Parts) -> App:
    services = parts.services
    inference = Inference(parts.calls, parts.invoke, parts.readers.for_calls, parts.regions)
    rate = services.settings.max_requests_per_address
    return App(
        parts.invoke,
        inference,
        services.access,
        all_routes(parts),
        parts.disk,
        audit=parts.request_audit,
        address_rate=AddressRate(rate) if rate else None,
        protocols=parts.protocols,
        web=WebApps(parts.calls, parts.invoke),
        terminals=parts.terminals,
        console=_console(parts),
    )


def _console(parts: Parts) -> Console:
    services, access = parts.services, parts.services.access
    sessions = Sessions(access, services.login, services.token_store)
    login = BrowserLogin(services.login, access, services.token_store, services.clock, services.issuers.post)
    sign_ins = SignIns(
        access, sessions, parts.tickets, parts.readers.for_management, audit=parts.request_audit, browser_login=login
    )
    return Console(access, sessions, sign_ins, parts.site)


def http2_tunnel(app: App, services: Services) -> Http2 | None:
    """Return the connections to the gRPC server, or None if gRPC is not installed."""
    if importlib.util.find_spec("grpc") is None or importlib.util.find_spec("google.protobuf") is None:
        return None
    settings, path = services.settings, Home.from_env().run / f"{services.name}.grpc"

    def load() -> Callable[[], Http2Server]:
        from gpufn_gateway.oip.grpc.server import GrpcServer  # noqa: PLC0415  only for gateways with gRPC clients

        return lambda: GrpcServer(app, services.access, settings, path)

    return Http2(load, settings.grace_s + settings.shutdown_timeout_s)
