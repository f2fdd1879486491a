"""Requests of functions for volumes, dicts, queues and stored values.

worker → runner    a Call frame with the verb DATA: an operation and its value, packed (`gpufn_core.protocol.codec`)
runner → gateway   a DataRequest with the function's name, and the value; any gateway answers with a DataReply

The runner stores the parts of a volume's file itself: they are too large for a message.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from gpufn_core.errors import DataNotFound, ErrorInfo, InvalidInput, InvalidSpec
from gpufn_core.ids import is_digest
from gpufn_core.protocol.records import BodyReference
from gpufn_core.spec.volume_spec import VolumeChange, check_name

_TAG_DIGITS = 12
PART_BYTES = 16 << 20  # the size of all but the last part of a volume's file


class PutVolumePart(msgspec.Struct, frozen=True, tag="volume.part"):
    """Store a part of a file, which starts at `offset`. The file has `size` bytes, and the sha256 `digest`. The reply's
    body is `STORED` if no further part is needed."""

    name: str
    digest: str
    size: int
    offset: int


class CommitVolume(msgspec.Struct, frozen=True, tag="volume.commit"):
    """Publish a version. The reply's body is a VolumeVersion."""

    name: str
    change: VolumeChange


class PutItem(msgspec.Struct, frozen=True, tag="queue.put"):
    """Store the message's body in a queue. A second item with the same id has no effect."""

    name: str
    content_type: str
    id: str
    ttl_s: float | None = None
    max_items: int | None = None


class GetItem(msgspec.Struct, frozen=True, tag="queue.get"):
    """Lease the first item of a queue. The reply's body is an ItemReply; empty if none came within `wait_s`.

    An item that was delivered `max_deliveries` times is moved to the queue's dead letters instead."""

    name: str
    wait_s: float
    lease_s: float
    max_deliveries: int | None = None


class SettleItem(msgspec.Struct, frozen=True, tag="queue.settle"):
    """End the lease of an item: remove it if `is_done`, else deliver it again."""

    name: str
    lease: str
    is_done: bool


class CountItems(msgspec.Struct, frozen=True, tag="queue.count"):
    """Count the items of a queue, with the leased ones. The reply's body is a number."""

    name: str


class ItemReply(msgspec.Struct, frozen=True):
    """A leased item; its value is the rest of the body."""

    lease: str
    content_type: str
    deliveries: int


class GetEntry(msgspec.Struct, frozen=True, tag="dict.get"):
    """Read an entry of a dict. The reply has no content type if the key is absent."""

    name: str
    key: str


class SetEntry(msgspec.Struct, frozen=True, tag="dict.set"):
    """Store the message's body in a dict. The reply's body is `true` or `false`: whether it was stored."""

    name: str
    key: str
    content_type: str
    ttl_s: float | None = None
    only_new: bool = False


class RemoveEntry(msgspec.Struct, frozen=True, tag="dict.remove"):
    """Delete an entry of a dict. The reply's body is `true` or `false`: whether it existed."""

    name: str
    key: str


class ListKeys(msgspec.Struct, frozen=True, tag="dict.keys"):
    """List the keys of a dict. The reply's body is a list."""

    name: str


class PutValue(msgspec.Struct, frozen=True, tag="value.put"):
    """Store the message's body for `ttl_s`. The reply's body is a StoredValue."""

    ttl_s: float
    name: str = ""


class GetValue(msgspec.Struct, frozen=True, tag="value.get"):
    """Read the stored value with the id `name`. The reply's body is the value."""

    name: str


class AdmitValue(msgspec.Struct, frozen=True, tag="value.admit"):
    """Query a gateway whether the team of the function may store a value of this size. A worker cannot send this
    query."""

    name: str
    size: int


class StoredValue(msgspec.Struct, frozen=True):
    """A stored value. Its id cannot be guessed: the owner of its blob, which is random, and its digest."""

    id: str
    size: int

    @classmethod
    def of(cls, reference: BodyReference) -> StoredValue:
        return cls(f"{reference.owner}.{reference.digest}", reference.size)

    @property
    def reference(self) -> BodyReference:
        """Where the value is stored. Raises DataNotFound for an id that no value can have."""
        owner, _, digest = self.id.rpartition(".")
        if _OWNER.fullmatch(owner) is None or not is_digest(digest):
            raise DataNotFound(f"{self.id[:100]!r} is not the id of a stored value: call gpufn.put")
        return BodyReference(owner, digest, self.size)


_OWNER = re.compile(r"waited-[0-9a-z]{26}(?:-([0-9a-z]{12}))?")


def value_tag(team: str) -> str:
    """Return the part of a value's owner that names the team, or "" without a team."""
    return hashlib.sha256(team.encode()).hexdigest()[:_TAG_DIGITS] if team else ""


def team_of_value(id_: str) -> str:
    """Return the tag in the id of a value, or "".

    >>> team_of_value(f"waited-{'0' * 26}-{value_tag('a')}.{'0' * 64}") == value_tag("a")
    True
    """
    found = _OWNER.fullmatch(id_.rpartition(".")[0])
    return "" if found is None else found[1] or ""


STORED = b"stored"

QueueOperation = PutItem | GetItem | SettleItem | CountItems
DictOperation = GetEntry | SetEntry | RemoveEntry | ListKeys
Forwarded = CommitVolume | QueueOperation | DictOperation  # to a gateway
ValueOperation = PutValue | GetValue
Operation = PutVolumePart | ValueOperation | Forwarded

FILE_BYTES = 4 << 30  # per file that a function commits to a volume
UNCOMMITTED_BYTES = 16 << 30  # per worker: files that were stored in the last hour and not committed
UNCOMMITTED_FILES = 10_000
ITEM_BYTES = 1 << 20  # per item of a queue or value in a dict
VALUE_BYTES = 60 << 20  # per value that `gpufn.put` stores
MAX_VALUES_BYTES = 16 << 30  # all stored values together
MAX_ITEMS = 100_000  # of a queue
MAX_DELIVERIES = 1_000  # the largest limit of an item's deliveries
MAX_ENTRIES = 10_000  # of a dict
MAX_DICTS_BYTES = 4 << 30  # all dicts together
KEY_CHARS = 256  # per key of a dict
WAIT_S = 25.0  # the longest wait of one request for an item
MIN_S, MAX_S = 1.0, 7 * 86_400.0  # range of a lease and of a time to live


def dead_letters_of(queue: str) -> str:
    """Return the name of the queue with the items of `queue` that were delivered too often.

    >>> dead_letters_of("prod/search/jobs")
    'prod/search/jobs-dead'
    """
    return f"{queue}-dead"


def check_max_deliveries(queue: str, number: int) -> None:
    """Raise InvalidInput unless the limit is within bounds, and the queue's name leaves room for `-dead`."""
    if not 1 <= number <= MAX_DELIVERIES:
        raise InvalidInput(f"max_deliveries is from 1 to {MAX_DELIVERIES:,}, not {number}", field="max_deliveries")
    try:
        check_name(dead_letters_of(queue))
    except InvalidSpec:
        raise InvalidInput(
            f"the name {queue!r} is too long for a queue with max_deliveries: its dead letters would be in "
            f"{dead_letters_of(queue)!r}",
            field="max_deliveries",
        ) from None


def check_seconds(what: str, seconds: float | None) -> None:
    """Raise InvalidInput unless a lease or a time to live is within bounds."""
    if seconds is not None and not MIN_S <= seconds <= MAX_S:
        raise InvalidInput(f"{what} is from {MIN_S:g} to {MAX_S:g} seconds, not {seconds:g}", field=what)


Asked = Forwarded | AdmitValue


class DataRequest(msgspec.Struct, frozen=True):
    """An operation that a function requests. The gateway completes names with the function's app."""

    function: str
    operation: Asked


class DataReply(msgspec.Struct, frozen=True):
    """The reply to a DataRequest. Its value is the message's body."""

    error: ErrorInfo | None = None
    content_type: str = ""
