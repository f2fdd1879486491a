"""A cookie that keeps the requests of a browser on one revision of a split application.

A page of one revision would otherwise load scripts and data of another. The cookie is set only while the calls of the
function are split, and for the session of the browser.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from typing import Final

from gpufn_gateway.web.match import Match

_NAME: Final = "gpufn-visitor"
_BYTES: Final = 12
_COOKIE: Final = re.compile(rb"(?:^|;)\s*%s=([A-Za-z0-9_-]{16})\s*(?:;|$)" % _NAME.encode())


def visitor_in(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the visitor that a request names, or "".

    >>> visitor_in([(b"cookie", b"a=b; gpufn-visitor=0123456789abcdef")]), visitor_in([(b"cookie", b"gpufn-visitor=x")])
    ('0123456789abcdef', '')
    """
    found = (_COOKIE.search(value) for name, value in headers if name == b"cookie")
    return next((match[1].decode() for match in found if match is not None), "")


def new_visitor() -> str:
    return secrets.token_urlsafe(_BYTES)


def set_cookie(visitor: str, match: Match, scheme: str) -> tuple[bytes, bytes]:
    secure = "; Secure" if scheme in ("https", "wss") else ""
    value = f"{_NAME}={visitor}; Path={match.address.root}/; HttpOnly; SameSite=Lax{secure}"
    return b"set-cookie", value.encode()
