"""Variants that the functions of this node call. A gateway makes and renews them; a runner cannot change records."""

from __future__ import annotations

from typing import Final

import msgspec

from gpufn_core.errors import error_from
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import VariantReply, VariantRequest
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock

_MOST: Final = 1000  # replies in memory

_reply = msgspec.msgpack.Decoder(VariantReply)


class Variants:
    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._known: dict[VariantRequest, tuple[VariantReply, float]] = {}

    async def find(self, function: str, selector: str, caller: str) -> VariantReply:
        """Return the variant of a function that the function `caller` calls, by their full names. Raises
        FunctionNotFound, Forbidden, InvalidInput, TooManyVariants, BusUnavailable."""
        request = VariantRequest(function, selector, caller)
        reply, until = self._known.get(request, (VariantReply(), 0.0))
        if self._clock.monotonic() < until:
            return reply
        message = await self._bus.request(subjects.VARIANTS, encode(request))
        reply = _reply.decode(message.payload)
        if reply.error is not None:
            raise error_from(reply.error)
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[request] = reply, self._clock.monotonic() + reply.valid_s
        return reply
