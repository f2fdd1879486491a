"""The regions of shared memory that clients have registered. They are in this gateway's memory only."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpufn_core.errors import CapacityError, Conflict, DataNotFound, Forbidden, InvalidInput
from gpufn_core.protocol import subjects
from gpufn_core.spec.naming import names
from gpufn_gateway.oip.shared_memory.files import ClientFiles, Identity
from gpufn_gateway.settings import GatewaySettings

MAX_REGIONS: Final = 64  # per key or team
MAX_BYTES: Final = 4 << 30  # all of these together: outputs in them may allocate so much memory in the gateway's name
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_LOOPBACK: Final = ("127.0.0.0/8", "::1/128", "::ffff:127.0.0.0/104")


class Region(NamedTuple):
    """`byte_size` bytes from `offset` on of the file `key`."""

    name: str
    key: str
    offset: int
    byte_size: int
    identity: Identity

    def view(self) -> dict[str, Any]:
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}


class Slice(NamedTuple):
    """Bytes of a region, which hold one tensor."""

    region: Region
    offset: int  # in the region
    size: int


class Regions:
    """The regions by owner: the team of a key, otherwise the key. `networks` are the clients that may use them."""

    def __init__(self, prefix: str, files: ClientFiles, networks: Sequence[str] = ()) -> None:
        self._prefix = prefix
        self._files = files
        self._networks = tuple(ipaddress.ip_network(each) for each in (*_LOOPBACK, *networks))
        self._by_owner: dict[str, dict[str, Region]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def check_client(self, client: Sequence[Any] | None) -> None:
        """Raise Forbidden unless the client is on this host, or in a network that the operator trusts like it."""
        try:
            address = ipaddress.ip_address(client[0] if client else "")
        except ValueError:
            raise _not_local() from None
        if not any(address in network for network in self._networks):
            raise _not_local()

    def prefix_of(self, owner: str) -> str:
        """Return how the keys of an owner begin. With API keys no owner can name the memory of another one.

        >>> regions = Regions("triton-", ClientFiles(0))
        >>> regions.prefix_of("team/search"), regions.prefix_of("platform")
        ('triton-team-search.', 'triton-')
        """
        return self._prefix if owner == subjects.PLATFORM else f"{self._prefix}{owner.replace('/', '-')}."

    def register(self, owner: str, name: str, key: str, offset: int, byte_size: int) -> Region:
        """Raises InvalidInput, Conflict, CapacityError."""
        if not _NAME.fullmatch(name):
            raise InvalidInput("the name of a region has 1 to 128 letters, digits, '.', '_', ':' and '-'", field="name")
        if offset < 0 or byte_size < 1:
            raise InvalidInput("a region has at least one byte, at an offset of at least 0")
        own = self._by_owner.get(owner, {})
        if name in own:
            raise Conflict(f"The region {name} is registered already: unregister it first.")
        if len(own) >= MAX_REGIONS:
            raise CapacityError(f"An API key, or a team, may register {MAX_REGIONS} regions: unregister one first.")
        if byte_size + sum(region.byte_size for region in own.values()) > MAX_BYTES:
            raise CapacityError(f"The regions of an API key, or a team, may have {MAX_BYTES:,} bytes together.")
        identity = self._files.identify(key, self.prefix_of(owner), offset + byte_size)
        region = Region(name, key, offset, byte_size, identity)
        self._by_owner.setdefault(owner, own)[name] = region
        return region

    def unregister(self, owner: str, name: str = "") -> None:
        """Forget one region, or all of an owner without a name. An unknown region is not an error, as in Triton."""
        own = self._by_owner.get(owner, {})
        if name:
            own.pop(name, None)
        if not name or not own:
            self.forget(owner)

    def forget(self, owner: str) -> None:
        """Forget the regions of a key or a team that was deleted."""
        self._by_owner.pop(owner, None)

    def all(self, owner: str) -> Mapping[str, Region]:
        return self._by_owner.get(owner, {})

    def get(self, owner: str, name: str) -> Region:
        """Raises DataNotFound."""
        region = self._by_owner.get(owner, {}).get(name)
        if region is None:
            raise DataNotFound(f"There is no shared memory region {names.shown(name)}: register it first.")
        return region

    def slice_of(self, owner: str, parameters: Mapping[str, Any], tensor: str) -> Slice:
        """Return the bytes that the parameters of a tensor name. Raises InvalidInput, DataNotFound."""
        name, offset = parameters["shared_memory_region"], parameters.get("shared_memory_offset", 0)
        size: Any = parameters.get("shared_memory_byte_size")
        if not isinstance(name, str) or not _is_size(size) or not _is_size(offset):
            raise InvalidInput(
                f"{tensor}: shared memory needs a region, a byte size and an offset, which are whole numbers of at "
                "least 0",
                field=tensor,
            )
        region = self.get(owner, name)
        if offset + size > region.byte_size:
            raise InvalidInput(
                f"{tensor}: {size} bytes at {offset} are not within the {region.byte_size} bytes of the region {name}",
                field=tensor,
            )
        return Slice(region, offset, size)

    def read_into(self, buffer: memoryview, piece: Slice, at: int) -> None:
        """Fill a buffer with the bytes of a slice from `at` on. Raises InvalidInput."""
        region = piece.region
        self._files.read_into(buffer, region.key, region.identity, region.offset + piece.offset + at)

    def write(self, part: bytes | memoryview, owner: str, piece: Slice, at: int) -> None:
        """Write bytes into a slice, `at` bytes behind its start. Raises InvalidInput, CapacityError, and DataNotFound
        for a region that was unregistered while the call ran."""
        region = piece.region
        if self.get(owner, region.name) is not region:
            raise InvalidInput(f"the region {region.name} was registered again while the call ran")
        if at + len(part) > piece.size:
            raise InvalidInput(f"an output is larger than its {piece.size} bytes of the region {region.name}")
        self._files.write(part, region.key, region.identity, region.offset + piece.offset + at)


def allowed_by(settings: GatewaySettings) -> Regions | None:
    """Return the regions of a gateway, or None if the operator does not allow any."""
    if not settings.shared_memory_prefix:
        return None
    uid = os.getuid() if settings.shared_memory_uid < 0 else settings.shared_memory_uid
    return Regions(settings.shared_memory_prefix, ClientFiles(uid), settings.shared_memory_networks)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _not_local() -> Forbidden:
    return Forbidden("Shared memory is only for clients on the gateway's host; GPUFN_SHARED_MEMORY_NETWORKS adds more.")
