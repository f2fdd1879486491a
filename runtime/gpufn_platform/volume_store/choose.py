"""The choice of the store, by GPUFN_VOLUME_STORE."""

from __future__ import annotations

from collections.abc import Mapping

from gpufn_core.weights.s3 import Bucket
from gpufn_platform.bus.connection import Bus
from gpufn_platform.process.clock import Clock
from gpufn_platform.volume_store.address import s3_location
from gpufn_platform.volume_store.on_bus import BusStore
from gpufn_platform.volume_store.store import VolumeStore


def volume_store(
    address: str, environ: Mapping[str, str], bus: Bus, clock: Clock, *, purges: bool = True
) -> VolumeStore:
    """Return the store at `address` (GPUFN_VOLUME_STORE). `environ` has the variables of AWS.

    `purges` False: for a role that may not purge streams of the bus. Raises ValueError, ArtifactUnavailable."""
    location = s3_location(address)
    if location is None:
        return BusStore(bus, purges=purges)
    from gpufn_platform.volume_store.s3 import S3Store  # noqa: PLC0415  its HTTP client is heavy

    return S3Store(Bucket.from_env(location.bucket, environ), location.prefix, clock)
