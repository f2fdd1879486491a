"""Subscription handlers for one message type. A message that cannot be decoded is logged and skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from gpufn_core.encoding.msgspec_errors import DECODE_ERRORS
from gpufn_platform.bus.connection import Message

log = logging.getLogger(__name__)

T = TypeVar("T")


def decoded(decoder: msgspec.msgpack.Decoder[T], handle: Callable[[T], None]) -> Callable[[Message], None]:
    """Return a handler for `Bus.subscribe` that decodes the payload and calls `handle` with it."""

    def on_message(message: Message) -> None:
        try:
            value = decoder.decode(message.payload)
        except DECODE_ERRORS as error:
            log.warning("cannot decode a message on %s: %s", message.subject, error)
            return
        handle(value)

    return on_message
