"""The key-value buckets of the gateway and its controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

import msgspec

from gpufn_core.domain.devices.engine import Build, EngineManifest
from gpufn_core.domain.revision import Function, Revision
from gpufn_core.domain.team import Team
from gpufn_core.domain.usage import USAGE_RETENTION_S
from gpufn_core.domain.worker import Assignment
from gpufn_core.protocol import subjects
from gpufn_core.protocol.data import MAX_DICTS_BYTES
from gpufn_core.protocol.records import CLIENT_FILES_RETENTION_S, ApiKey, NodeDrain
from gpufn_platform.bus.connection import Bus
from gpufn_platform.bus.storage.key_value import KeyValue

T = TypeVar("T")


decode_function = msgspec.msgpack.Decoder(Function).decode
decode_revision = msgspec.msgpack.Decoder(Revision).decode
decode_assignment = msgspec.msgpack.Decoder(Assignment).decode
decode_node_drain = msgspec.msgpack.Decoder(NodeDrain).decode
decode_team = msgspec.msgpack.Decoder(Team).decode
decode_key = msgspec.msgpack.Decoder(ApiKey).decode
decode_build = msgspec.msgpack.Decoder(Build).decode
decode_manifest = msgspec.msgpack.Decoder(EngineManifest).decode


async def records(bucket: KeyValue, decode: Callable[[bytes], T]) -> list[T]:
    """Read all records from the bus; a watch may lag behind."""
    return [decode(entry.value) for entry in await bucket.entries()]


@dataclass(frozen=True)
class Buckets:
    functions: KeyValue
    revisions: KeyValue
    assignments: KeyValue
    leases: KeyValue
    arrivals: KeyValue
    node_drains: KeyValue
    teams: KeyValue
    keys: KeyValue
    key_use: KeyValue
    token_keys: KeyValue
    users: KeyValue
    webhook_secrets: KeyValue
    secrets: KeyValue
    signing: KeyValue
    schedules: KeyValue
    builds: KeyValue
    engines: KeyValue
    volumes: KeyValue
    dicts: KeyValue
    usage: KeyValue
    client_files: KeyValue

    @classmethod
    async def open(cls, bus: Bus) -> Buckets:
        """Open the buckets. Creates the missing ones."""
        return cls(
            functions=await KeyValue.open(bus, subjects.FUNCTIONS),
            revisions=await KeyValue.open(bus, subjects.REVISIONS),
            assignments=await KeyValue.open(bus, subjects.ASSIGNMENTS),
            leases=await KeyValue.open(bus, subjects.LEASES),
            arrivals=await KeyValue.open(bus, subjects.ARRIVALS),
            node_drains=await KeyValue.open(bus, subjects.NODE_DRAINS),
            teams=await KeyValue.open(bus, subjects.TEAMS),
            keys=await KeyValue.open(bus, subjects.API_KEYS),
            key_use=await KeyValue.open(bus, subjects.KEY_USE),
            token_keys=await KeyValue.open(bus, subjects.TOKEN_KEYS),
            users=await KeyValue.open(bus, subjects.USERS),
            schedules=await KeyValue.open(bus, subjects.SCHEDULES),
            webhook_secrets=await KeyValue.open(bus, subjects.WEBHOOK_SECRETS),
            secrets=await KeyValue.open(bus, subjects.SECRETS),
            signing=await KeyValue.open(bus, subjects.SIGNING),
            builds=await KeyValue.open(bus, subjects.BUILDS),
            engines=await KeyValue.open(bus, subjects.ENGINES),
            volumes=await KeyValue.open(bus, subjects.VOLUMES),
            dicts=await KeyValue.open(bus, subjects.DICTS, max_bytes=MAX_DICTS_BYTES),
            usage=await KeyValue.open(bus, subjects.USAGE, ttl_s=USAGE_RETENTION_S),
            client_files=await KeyValue.open(bus, subjects.CLIENT_FILES, ttl_s=CLIENT_FILES_RETENTION_S),
        )

    async def ensure(self) -> None:
        """Create the buckets that the bus has lost."""
        for bucket in fields(self):
            await getattr(self, bucket.name).ensure()
