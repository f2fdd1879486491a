"""Requests of runners whose functions call variants."""

from __future__ import annotations

from typing import Final

import msgspec

from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import VariantReply, VariantRequest
from gpufn_gateway.functions.variants import TTL_S, Variants
from gpufn_gateway.responder import Responder
from gpufn_platform.bus.connection import Bus

_VALID_S: Final = TTL_S / 5

_request = msgspec.msgpack.Decoder(VariantRequest)


class VariantRequests:
    def __init__(self, bus: Bus, variants: Variants) -> None:
        self._variants = variants
        self._responder = Responder(
            bus, subjects.VARIANTS, self._answer, lambda error: encode(VariantReply(error=error))
        )

    def start(self) -> None:
        self._responder.start()

    async def _answer(self, payload: bytes) -> bytes:
        request = _request.decode(payload)
        name, revision = await self._variants.provide_for_function(request.function, request.selector, request.caller)
        return encode(VariantReply(name, revision, _VALID_S))
