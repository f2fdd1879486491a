"""nats-py, without the websockets that it has where aiohttp is installed.

They cannot be used here (docs/decisions/0001-nats-client.md), and to import aiohttp costs each process of the platform
0.2 s and 11 MB.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Whoever imports it meanwhile finds that it is not installed. One that is imported already stays."""
    if module in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules[module] = None
    try:
        yield
    finally:
        del modules[module]


with _without("aiohttp"):
    from nats.aio.client import Client
    from nats.errors import Error as NatsError

__all__ = ["Client", "NatsError"]
