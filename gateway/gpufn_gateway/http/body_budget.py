"""How much of a request is read into memory, by what it is; all readers share one budget."""

from __future__ import annotations

from typing import Final

from gpufn_gateway.calls.call_bodies import CallBodies
from gpufn_gateway.calls.shared_bodies import GatewayParcels
from gpufn_gateway.http.body_reader import BodyBudget, BodyReader
from gpufn_gateway.settings import GatewaySettings

_MANAGE_BYTES: Final = 4 << 20  # a deploy's spec, with its schemas
_SLOW_UPLOAD: Final = 10  # a bundle has so many times as long as a call's arguments


class Readers:
    """`max_payload` is the bus's: what a message carries in bytes."""

    def __init__(self, settings: GatewaySettings, max_payload: int, parcels: GatewayParcels) -> None:
        timeout_s, budget = settings.body_timeout_s, BodyBudget(settings.max_bodies_bytes)
        call_bytes, largest_bytes = settings.max_call_bytes(max_payload), settings.max_body_bytes
        manage_bytes = min(_MANAGE_BYTES, largest_bytes)
        inline = BodyReader(call_bytes, timeout_s, what="a call's arguments", budget=budget)
        large = BodyReader(largest_bytes, timeout_s, what="a call's arguments", budget=budget)
        self.of_calls = CallBodies(inline, large, parcels)
        self.of_bundles = BodyReader(largest_bytes, timeout_s * _SLOW_UPLOAD, what="a bundle", budget=budget)
        self.of_management = BodyReader(manage_bytes, timeout_s, what="this request", budget=budget)
