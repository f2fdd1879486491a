"""Bounds of values in paths, queries and headers, for the routes that check them and the OpenAPI document. Pure."""

from __future__ import annotations

import re
from typing import Final

MAX_WAIT_S: Final = 60.0  # proxies close longer long polls; the client repeats the request
MAX_LISTED: Final = 1000  # entries per response
MAX_LOG_LINES: Final = 20_000
MAX_CONSOLE_ROWS: Final = 500  # functions in one part of a list
MAX_CONSOLE_OFFSET: Final = 10_000_000
MAX_CHANGE: Final = 2**53  # change number of a build
CURSOR: Final = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")  # place of a reader of outcomes, or of calls
# What a query of the history is about, and comma-separated names of series or kinds of events.
HISTORY_SUBJECT: Final = re.compile(r"overview|(function|node|gpu):[^\s:@]+(@[0-9]{1,9})?")
NAMES: Final = re.compile(r"[a-z0-9_]+(,[a-z0-9_]+)*")
_COLUMN = "(?:day|team|app|function|key)"
COST_COLUMNS: Final = re.compile(rf"{_COLUMN}(?:,{_COLUMN})*")
MAX_INDEX_DIGITS: Final = 12  # index of an item in its map
MAX_SEQUENCE_DIGITS: Final = 18
MAX_IDEMPOTENCY_KEY_LENGTH: Final = 255  # characters
