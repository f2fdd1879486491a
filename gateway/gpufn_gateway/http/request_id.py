"""The id of a request, which its response, its problem and its log lines have in common.

A client or proxy may choose the id with `X-Request-Id`. Otherwise the gateway creates one, from a number that is random
per process and a counter.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

FIELD: Final = b"x-request-id"
SCOPE_KEY: Final = "gpufn.request_id"
current: Final[ContextVar[str]] = ContextVar("request_id", default="")  # id of the request that this task serves

_MAX_LENGTH: Final = 128
_WELL_FORMED: Final = re.compile(rb"[A-Za-z0-9._~+/=:@-]{1,%d}" % _MAX_LENGTH)  # safe in a log line and a header
_process: Final = secrets.token_hex(6).encode()
_numbers: Final = itertools.count(1)


def of(fields: Mapping[bytes, bytes]) -> bytes:
    """Return the id in a request's header fields if it is well-formed, otherwise a new one.

    >>> of({b"x-request-id": b"a-1"}), of({b"x-request-id": b"a b"}) == b"a b"
    (b'a-1', False)
    """
    chosen = fields.get(FIELD)
    if chosen is not None and _WELL_FORMED.fullmatch(chosen):
        return chosen
    return b"%b-%x" % (_process, next(_numbers))


def add_to_record(record: logging.LogRecord) -> bool:
    """Set `record.request` for the format of log lines; empty outside a request. Use it as a filter of a handler."""
    request_id = current.get()
    record.request = f" (request {request_id})" if request_id else ""
    return True
