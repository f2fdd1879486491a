"""Publication of finished spans to the gateways, over core NATS: a span is lost if no gateway listens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from gpufn_core.errors import GpufnError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.spans import Span, SpanBatch
from gpufn_platform.bus.connection import Bus

log = logging.getLogger(__name__)

MAX_BUFFERED: Final = 4096  # spans
_DELAY_S: Final = 0.2
_AT_ONCE: Final = 64  # spans in a message: with the longest texts they have 250 KB


class SpanReporter:
    """Collects spans for a moment and publishes them. `dropped` counts spans that could not be sent."""

    def __init__(self, bus: Bus, sender: str) -> None:
        self._bus = bus
        self._sender = sender
        self._spans: list[Span] = []
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = 0

    def add(self, spans: Sequence[Span]) -> None:
        room = MAX_BUFFERED - len(self._spans)
        self.dropped += max(0, len(spans) - room)
        self._spans += spans[:room]
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self.flush)

    def flush(self) -> None:
        """Publish the collected spans. While the bus is away, they are dropped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        spans, self._spans = self._spans, []
        for start in range(0, len(spans), _AT_ONCE):
            part = tuple(spans[start : start + _AT_ONCE])
            try:
                self._bus.publish(subjects.SPANS, encode(SpanBatch(self._sender, part, self.dropped)))
            except GpufnError as error:
                self.dropped += len(part)
                log.debug("%d spans are dropped: %s", len(part), error)
