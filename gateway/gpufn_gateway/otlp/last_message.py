"""The reason of a failed export, which OpenTelemetry's exporters only log."""

from __future__ import annotations

import logging
from typing import Final

_MAX_CHARS: Final = 400


class LastMessage(logging.Handler):
    """Keeps the last message of the logger `name`, which logs each try: `exporter` logs the first failure."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._text = ""
        logger = logging.getLogger(name)
        logger.handlers, logger.filters, logger.propagate = [self], [], False

    def clear(self) -> None:
        self._text = ""

    @property
    def reason(self) -> str:
        return self._text or "no reason is known"

    def emit(self, record: logging.LogRecord) -> None:
        self._text = record.getMessage()[:_MAX_CHARS]
