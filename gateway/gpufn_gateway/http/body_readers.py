"""The limits of request bodies in memory, by kind of request. All readers share one budget."""

from __future__ import annotations

from typing import Final

from gpufn_gateway.calls.call_bodies import CallBodies
from gpufn_gateway.calls.shared_bodies import GatewaySharedBodies
from gpufn_gateway.http.body_reader import BodyBudget, BodyReader
from gpufn_gateway.settings import GatewaySettings

_MANAGEMENT_BYTES: Final = 4 << 20  # a deploy's spec, with its schemas
_LOGIN_BYTES: Final = 64 << 10  # anybody may send it
_BUNDLE_TIMEOUT_FACTOR: Final = 10  # a bundle's upload timeout, as a multiple of the timeout for a call's arguments


class BodyReaders:
    """The body readers of a gateway. `max_payload` is the largest NATS message in bytes."""

    def __init__(self, settings: GatewaySettings, max_payload: int, shared_bodies: GatewaySharedBodies) -> None:
        timeout_s, budget = settings.body_timeout_s, BodyBudget(settings.max_bodies_bytes)
        call_bytes, max_bytes = settings.max_call_bytes(max_payload), settings.max_body_bytes
        management_bytes = min(_MANAGEMENT_BYTES, max_bytes)
        inline = BodyReader(call_bytes, timeout_s, what="a call's arguments", budget=budget)
        large = BodyReader(max_bytes, timeout_s, what="a call's arguments", budget=budget)
        self.for_calls = CallBodies(inline, large, shared_bodies)
        self.for_bundles = BodyReader(max_bytes, timeout_s * _BUNDLE_TIMEOUT_FACTOR, what="a bundle", budget=budget)
        self.for_logins = BodyReader(_LOGIN_BYTES, timeout_s, what="a login", budget=budget)
        self.for_management = BodyReader(management_bytes, timeout_s, what="this request", budget=budget)
