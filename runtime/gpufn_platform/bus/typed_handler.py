"""A handler for messages of one type: what cannot be read is logged, and costs nobody else anything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from gpufn_platform.bus.connection import Message

log = logging.getLogger(__name__)

T = TypeVar("T")


def decoded(decoder: msgspec.msgpack.Decoder[T], take: Callable[[T], None]) -> Callable[[Message], None]:
    """For `Bus.subscribe`: `take` gets the decoded payload."""

    def on_message(message: Message) -> None:
        try:
            told = decoder.decode(message.payload)
        except msgspec.DecodeError as error:
            log.warning("cannot read what came on %s: %s", message.subject, error)
            return
        take(told)

    return on_message
