"""Bounds of the values in paths, queries and headers. The routes check them; the OpenAPI document states them. Pure."""

from __future__ import annotations

import re
from typing import Final

LONGEST_WAIT_S: Final = 60.0  # proxies cut longer ones; the client asks again
MOST_LISTED: Final = 1000  # in one answer
MOST_LOG_LINES: Final = 20_000
LARGEST_CHANGE: Final = 2**53  # of a build
CURSOR: Final = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")  # where a reader of a map's outcomes is
LONGEST_PLACE: Final = 12  # digits of an item's index in its map
LONGEST_IDEMPOTENCY_KEY: Final = 255  # characters
