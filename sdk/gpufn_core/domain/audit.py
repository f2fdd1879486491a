"""Audit records and their hash chain. Pure.

Each record contains the SHA-256 of the record before it. So a record cannot be changed, removed or inserted without a
change of all later hashes, and a hash that was kept elsewhere proves all records before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import msgspec

START: Final = "0" * 64  # the predecessor of the first record
LONGEST_TEXT: Final = 200


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One action or refusal. `action` is the method and the route, `object` the value of its path. `principal` is the
    id of an API key, "local" for a client of the loopback without keys, "platform" for the platform itself, or "" for a
    client without a valid key.
    `status` is the HTTP status of the response, and `code` the code of its error. `count` > 1: that many equal
    refusals, until `at`. `previous` is the hash of the record before."""

    seq: int  # from 1
    at: float  # unix seconds
    principal: str = ""
    label: str = ""  # of the key
    address: str = ""
    request_id: str = ""
    action: str
    object: str = ""
    status: int
    code: str = ""
    details: dict[str, str] = {}
    count: int = 1
    previous: str

    def canonical(self) -> bytes:
        """Return the JSON that is stored and hashed: fields in the order of this class, keys of `details` sorted."""
        details = dict(sorted(self.details.items()))
        return msgspec.json.encode(msgspec.structs.replace(self, details=details))

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.canonical()).hexdigest()


class Fault(msgspec.Struct, frozen=True):
    """The first place at which a chain is broken. `seq` is the number of the record."""

    seq: int
    reason: str


class ChainCheck:
    """Check of a chain, record by record. The first record is trusted to follow its `previous`: older records may have
    been removed at the end of their retention."""

    def __init__(self) -> None:
        self.first: AuditRecord | None = None
        self.last: AuditRecord | None = None
        self.fault: Fault | None = None
        self.count = 0

    def add(self, record: AuditRecord, stored: bytes | None = None) -> None:
        """Check the next record; `stored` are its bytes as stored, which must be canonical."""
        if self.fault is not None:
            return
        self.fault = self._fault(record, stored)
        self.first = self.first or record
        self.last = record
        self.count += 1

    def _fault(self, record: AuditRecord, stored: bytes | None) -> Fault | None:
        if stored is not None and record.canonical() != stored:
            return Fault(record.seq, "its bytes are not those that gpufn writes")
        if self.last is None:
            if record.seq == 1 and record.previous != START:
                return Fault(1, "it claims a record before the first one")
            return None
        if record.seq != self.last.seq + 1:
            return Fault(self.last.seq + 1, f"it is missing: record {record.seq} follows {self.last.seq}")
        if record.previous != self.last.hash:
            return Fault(record.seq, f"it does not follow record {self.last.seq}: one of the two was changed")
        return None


def check(records: Iterable[AuditRecord]) -> Fault | None:
    """Return the first fault of a chain, or None.

    >>> one = AuditRecord(seq=1, at=0.0, action="DELETE /v1/functions/{fn}", object="f", status=204, previous=START)
    >>> two = AuditRecord(seq=2, at=1.0, action="POST /v1/keys", status=201, previous=one.hash)
    >>> check([one, two]), check([msgspec.structs.replace(one, object="g"), two]).seq
    (None, 2)
    """
    chain = ChainCheck()
    for record in records:
        chain.add(record)
    return chain.fault
