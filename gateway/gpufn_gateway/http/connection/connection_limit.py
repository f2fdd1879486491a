"""A limit on the open connections per client address. Pure.

An IPv6 /64 counts as one address, since a single host may use all addresses in it.
"""

from __future__ import annotations

import ipaddress
from collections import Counter


class ConnectionLimit:
    """At most `limit` connections per address may be open."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: Counter[str] = Counter()

    def add(self, address: str) -> bool:
        """Count a connection. False if its address is at the limit; the connection is not counted then."""
        key = network(address)
        if self._open[key] >= self.limit:
            return False
        self._open[key] += 1
        return True

    def remove(self, address: str) -> None:
        """Remove a connection that was counted."""
        key = network(address)
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


def network(address: str) -> str:
    """Return the key under which `address` counts.

    >>> network("192.0.2.1"), network("::ffff:192.0.2.1"), network("2001:db8::1")
    ('192.0.2.1', '192.0.2.1', '2001:db8::')
    """
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(parsed) >> 64 << 64))
