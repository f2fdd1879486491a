"""Answers the runners whose functions call variants: one gateway of all answers each request."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import GpufnError, PlatformError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.messages import VariantReply, VariantRequest
from gpufn_gateway.functions.variants import TTL_S, Variants
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.process.tasks import Tasks

log = logging.getLogger(__name__)

_QUEUE: Final = "gateways"
_VALID_S: Final = TTL_S / 5

_request = msgspec.msgpack.Decoder(VariantRequest)


class VariantRequests:
    def __init__(self, bus: Bus, variants: Variants) -> None:
        self._bus = bus
        self._variants = variants
        self._tasks = Tasks("variants for runners")

    def start(self) -> None:
        self._bus.subscribe(subjects.VARIANTS, self._on_request, queue=_QUEUE)

    def _on_request(self, message: Message) -> None:
        if message.reply:
            self._tasks.start(self._answer(message))

    async def _answer(self, message: Message) -> None:
        try:
            request = _request.decode(message.payload)
            name, revision = await self._variants.provide_for_function(
                request.function, request.selector, request.caller
            )
            reply = VariantReply(name, revision, _VALID_S)
        except DECODE_ERRORS as error:
            log.warning("cannot decode a request for a variant: %s", error)
            reply = VariantReply(error=PlatformError().info())
        except GpufnError as error:
            reply = VariantReply(error=error.info())
        self._bus.publish(message.reply, encode(reply))
