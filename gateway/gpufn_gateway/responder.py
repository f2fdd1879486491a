"""Answers to requests on the bus. One gateway of all answers each request, and each request gets an answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_core.errors import BusUnavailable, ErrorInfo, GpufnError, PayloadTooLarge, PlatformError
from gpufn_platform.bus.connection import Bus, Message, Subscription
from gpufn_platform.process.tasks import Tasks

log = logging.getLogger(__name__)

_QUEUE: Final = "gateways"


class Responder:
    """`answer` returns the reply to a request, and `refuse` the reply with an error."""

    def __init__(
        self,
        bus: Bus,
        subject: str,
        answer: Callable[[bytes], Awaitable[bytes]],
        refuse: Callable[[ErrorInfo], bytes],
    ) -> None:
        self._bus = bus
        self._subject = subject
        self._answer = answer
        self._refuse = refuse
        self._tasks = Tasks(f"request on {subject}")

    def start(self) -> Subscription:
        return self._bus.subscribe(self._subject, self._on_message, queue=_QUEUE)

    def _on_message(self, message: Message) -> None:
        if message.reply:
            self._tasks.start(self._respond(message))

    async def _respond(self, message: Message) -> None:
        reply = await self._reply(message.payload)
        try:
            try:
                self._bus.publish(message.reply, reply)
            except PayloadTooLarge:
                error = PayloadTooLarge(f"The reply has {len(reply):,} bytes, more than a message may have.")
                self._bus.publish(message.reply, self._refuse(error.info()))
        except BusUnavailable:  # the requester sends the request again
            log.info("a reply on %s is lost: the bus is away", self._subject)

    async def _reply(self, request: bytes) -> bytes:
        try:
            return await self._answer(request)
        except GpufnError as error:
            return self._refuse(error.info())
        except DECODE_ERRORS as error:
            log.warning("cannot decode a request on %s: %s", self._subject, error)
        except Exception:
            log.exception("a request on %s failed", self._subject)
        return self._refuse(PlatformError().info())
