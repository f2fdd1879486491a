"""Log lines of functions, from the bus to a collector. One of the gateways with a collector exports each line."""

from __future__ import annotations

import asyncio
import functools
from typing import Final

from gpufn_core.protocol import subjects
from gpufn_gateway.metrics.families import Families
from gpufn_gateway.metrics.telemetry import Fill
from gpufn_gateway.otlp.exporter import Exporter
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.bus.connection import Bus, Message
from gpufn_platform.process.settings import InvalidSetting

_GROUP: Final = "log-exporters"


class LogExport:
    """Lines stay encoded until the thread of the exporter has them: the event loop only queues them."""

    def __init__(self, bus: Bus, exporter: Exporter[bytes]) -> None:
        self._bus = bus
        self._exporter = exporter

    @classmethod
    def open(cls, settings: GatewaySettings, bus: Bus) -> LogExport | None:
        """Return None without a collector of logs. Raises InvalidSetting if the library is not installed."""
        if not settings.logs_url:
            return None
        try:
            from gpufn_gateway.otlp.logs import LogCollector  # noqa: PLC0415  only for gateways with a collector
        except ImportError as error:
            raise InvalidSetting(
                f"GPUFN_LOGS_URL needs OpenTelemetry's exporter: pip install 'gpufn[traces]' ({error})."
            ) from error
        collector = LogCollector(settings.logs_url, has_spans=settings.traces)
        export = cls(bus, Exporter("log lines", collector.send, collector.interrupt, bytes_of=len))
        export.start()
        return export

    def start(self) -> None:
        self._bus.subscribe(subjects.LOGS_FILTER, self._take, queue=_GROUP)

    async def run(self) -> None:
        """Wait until cancelled, then export the remaining lines."""
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(self._exporter.close)

    def snapshot(self) -> Fill:
        """A part of the scrape: the outcomes of the lines."""
        return functools.partial(_fill, self._exporter.counts())

    def _take(self, message: Message) -> None:
        self._exporter.add([bytes(message.payload)])


def _fill(counts: dict[str, int], families: Families) -> None:
    for result, count in counts.items():
        families.add("gpufn_exported_log_lines", count, result)
