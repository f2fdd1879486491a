"""The parts of tracing, built from the gateway's settings."""

from __future__ import annotations

import math
from typing import NamedTuple

from gpufn_core.protocol.spans import Span
from gpufn_gateway.otlp.exporter import Exporter
from gpufn_gateway.settings import GatewaySettings
from gpufn_gateway.traces.build_spans import BuildTraces
from gpufn_gateway.traces.receiver import Receiver
from gpufn_gateway.traces.store import TraceStore
from gpufn_gateway.traces.tracing import Sampling, Tracing
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.traces.reporter import SpanReporter


class Traces(NamedTuple):
    tracing: Tracing
    store: TraceStore
    receiver: Receiver
    builds: BuildTraces

    @classmethod
    def open(cls, settings: GatewaySettings, bus: Bus, clock: Clock, name: str) -> Traces | None:
        """Return None if calls are not traced. Raises InvalidSetting if the exporter is not installed."""
        if not settings.traces:
            return None
        exporter = None if not settings.traces_url else _exporter(settings.traces_url)
        reporter, store = SpanReporter(bus, name), TraceStore()
        receiver = Receiver(bus, store, reporter, exporter)
        receiver.start()
        sampling = Sampling(settings.traces_ratio, settings.traces_slow_s or math.inf)
        return cls(Tracing(sampling, reporter, clock), store, receiver, BuildTraces(sampling, reporter, clock))


def _exporter(url: str) -> Exporter[Span]:
    try:
        from gpufn_gateway.otlp.spans import SpanCollector  # noqa: PLC0415  only for gateways with a collector
    except ImportError as error:
        raise InvalidSetting(
            f"GPUFN_TRACES_URL needs OpenTelemetry's exporter: pip install 'gpufn[traces]' ({error})."
        ) from error
    collector = SpanCollector(url)
    return Exporter("spans", collector.send, collector.interrupt)
