"""Deletion of all API keys, for operators who lost every key (`gpufn keys reset`)."""

from __future__ import annotations

import asyncio
import os

from gpufn_core.home import Home
from gpufn_core.protocol import subjects
from gpufn_local.bus_certificates import with_own_authority
from gpufn_local.nats_process import address_in
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.bus.tls import BusTls


def delete_all_keys() -> list[str]:
    """Delete every API key and return the ids. Needs access to NATS: GPUFN_NATS_URL, or the files of GPUFN_HOME."""
    home, tls = Home.from_env(), BusTls.from_env(os.environ)
    if not (address := os.environ.get("GPUFN_NATS_URL")):
        address, tls = address_in(home.nats), with_own_authority(tls, home.nats / "tls")
    return asyncio.run(_delete_all(address, tls))


async def _delete_all(address: str, tls: BusTls) -> list[str]:
    bus = await Bus.connect(address, name="keys reset", tls=tls)
    try:
        keys = await KeyValue.open(bus, subjects.API_KEYS)
        ids = sorted(await keys.keys())
        for each in ids:
            await keys.delete(each)
    finally:
        await bus.close()
    return ids
