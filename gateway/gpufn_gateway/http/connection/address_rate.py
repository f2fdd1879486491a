"""A limit on the requests per second of each client address. Pure; `now` is monotonic, in seconds.

It holds before a request is authenticated and its body read. An IPv6 /64 counts as one address.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

from gpufn_gateway.auth.quotas import Bucket
from gpufn_gateway.http.connection.connection_limit import network

MAX_ADDRESSES: Final = 100_000  # remembered addresses; beyond it, the address that was silent the longest is forgotten


class AddressRate:
    """At most `rate` requests per second and address, and as many at once (at least one).

    >>> limit = AddressRate(2.0)
    >>> [limit.wait_s("192.0.2.1", now=0.0) for _ in range(3)], limit.wait_s("192.0.2.2", now=0.0)
    ([0.0, 0.0, 0.5], 0.0)
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._burst = max(1, math.ceil(rate))
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def wait_s(self, address: str, now: float) -> float:
        """Count a request. Return 0.0 if it may be served, else the seconds until the next one may."""
        key = network(address)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = Bucket(self.rate, self._burst, now)
            if len(self._buckets) > MAX_ADDRESSES:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return 0.0 if bucket.take(now) else bucket.wait_s(now)
