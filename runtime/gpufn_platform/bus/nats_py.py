"""nats-py without its websocket transport, which it enables when aiohttp is installed.

gpufn does not support websockets (docs/decisions/0001-nats-client.md), and importing aiohttp costs each process 0.2 s
and 11 MB.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Make `module` look uninstalled to imports inside the block. An already imported module stays unchanged."""
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
