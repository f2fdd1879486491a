"""The file of prices, read again after it has changed."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from gpufn_gateway.costs.prices import Prices
from gpufn_platform.process.settings import InvalidSetting

log = logging.getLogger(__name__)


class PriceFile:
    """Raises InvalidSetting if the file is unusable at the start. Without a file there are no prices."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._changed_at = 0 if path is None else _changed_at(path)
        self._prices = None if path is None else _read(path)

    def prices(self) -> Prices | None:
        """Return the prices as they are now; the last valid ones if the file is unusable now."""
        if self._path is None:
            return None
        if (changed_at := _changed_at(self._path)) != self._changed_at:
            self._changed_at = changed_at
            try:
                self._prices = _read(self._path)
                log.info("new prices are in force: %s", self._path)
            except InvalidSetting as error:
                log.error("the earlier prices stay in force: %s", error)
        return self._prices


def _changed_at(path: Path) -> int:
    """Return when a file was changed, in ns; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> Prices:
    try:
        return Prices.parse(path.read_bytes())
    except OSError as error:
        raise InvalidSetting(f"GPUFN_PRICES={path}: {error.strerror}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise InvalidSetting(f"GPUFN_PRICES={path}: {error}") from None
