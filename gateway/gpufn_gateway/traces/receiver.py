"""Spans of all processes, from the bus. Every gateway keeps them, and one of those with a collector exports each."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Final

import msgspec

from gpufn_core.errors import GpufnError
from gpufn_core.protocol import subjects
from gpufn_core.protocol.spans import Span, SpanBatch
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.telemetry import Fill
from gpufn_gateway.otlp.exporter import Exporter
from gpufn_gateway.traces.store import TraceStore
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.typed_handler import decoded
from gpufn_platform.traces.reporter import SpanReporter

_GROUP: Final = "exporters"
_MAX_SENDERS: Final = 10_000

_batch = msgspec.msgpack.Decoder(SpanBatch)


class Receiver:
    """`reporter` is this gateway's own, flushed at the end."""

    def __init__(self, bus: Bus, store: TraceStore, reporter: SpanReporter, exporter: Exporter[Span] | None) -> None:
        self._bus = bus
        self._store = store
        self._reporter = reporter
        self._exporter = exporter
        self._dropped: dict[str, int] = {}  # by sender, as it reported last

    def start(self) -> None:
        self._bus.subscribe(subjects.SPANS, decoded(_batch, self._keep))
        if self._exporter is not None:
            self._bus.subscribe(subjects.SPANS, decoded(_batch, self._export), queue=_GROUP)

    async def run(self) -> None:
        """Wait until cancelled, then export the remaining spans."""
        try:
            await asyncio.Event().wait()
        finally:
            self._reporter.flush()
            with contextlib.suppress(GpufnError):
                await self._bus.flush()
            if self._exporter is not None:
                await asyncio.to_thread(self._exporter.close)

    def snapshot(self) -> Fill:
        """A part of the scrape: the outcomes of the spans."""
        counts = {"not_sent": sum(self._dropped.values())}
        if self._exporter is not None:
            counts |= self._exporter.counts()
        return functools.partial(_fill, counts)

    def _keep(self, batch: SpanBatch) -> None:
        if batch.dropped and (batch.sender in self._dropped or len(self._dropped) < _MAX_SENDERS):
            self._dropped[batch.sender] = batch.dropped
        self._store.add(batch.spans)

    def _export(self, batch: SpanBatch) -> None:
        assert self._exporter is not None
        self._exporter.add(batch.spans)


def _fill(counts: dict[str, int], families: Families) -> None:
    for result, count in counts.items():
        families.add("gpufn_trace_spans", count, result)
