"""The Host field of a request, parsed as RFC 9110 and RFC 3986 define it: uri-host [":" port]. Pure.

The parser is strict for security: the host `[::1].evil.example` must not pass for the loopback address `::1`.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from typing import Final, NamedTuple

_MAX_BYTES: Final = 300  # a DNS name has 255 at most
_AUTHORITY: Final = re.compile(
    rb"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>(?:[A-Za-z0-9\-._~!$&'()*+,;=]|%[0-9A-Fa-f]{2})*))(?::(?P<port>[0-9]*))?"
)


class Authority(NamedTuple):
    """`host` is in lower case, without brackets; `port` is None if the field has none."""

    host: str
    port: int | None


@functools.lru_cache(256)
def parse(field: bytes) -> Authority | None:
    """Parse a Host field. None if `field` is not a host and an optional port.

    >>> parse(b"[::1]:8090"), parse(b"[::1].evil.example"), parse(b"localhost:80:evil")
    (Authority(host='::1', port=8090), None, None)
    """
    match = _AUTHORITY.fullmatch(field) if len(field) <= _MAX_BYTES else None
    if match is None:
        return None
    port = int(match["port"]) if match["port"] else None
    if port is not None and port > 65535:
        return None
    if match["ipv6"] is None:
        return Authority(match["name"].decode().lower(), port)
    try:
        return Authority(str(ipaddress.IPv6Address(match["ipv6"].decode())), port)
    except ValueError:
        return None
