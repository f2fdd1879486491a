"""A bound of the open connections per client address. Pure.

The clients behind one IPv6 /64 count as one address, since a single host may use all of its addresses.
"""

from __future__ import annotations

import ipaddress


class ConnectionLimit:
    """`most` connections of one address may be open."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: dict[str, int] = {}

    def opened(self, address: str) -> bool:
        """Count a connection. False, and not counted, when its address has as many as it may."""
        key = network(address)
        count = self._open.get(key, 0)
        if count >= self.most:
            return False
        self._open[key] = count + 1
        return True

    def closed(self, address: str) -> None:
        """Forget a connection that was counted."""
        key = network(address)
        count = self._open.pop(key) - 1
        if count:
            self._open[key] = count


def network(address: str) -> str:
    """The name under which `address` counts.

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
