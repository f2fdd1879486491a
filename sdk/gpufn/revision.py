"""Functions and Revisions as the platform stores them, and a Revision's states."""

from __future__ import annotations

import enum

import msgspec

from gpufn.ids import Digest
from gpufn.spec import FunctionSpec


class RevisionState(enum.StrEnum):
    BUILDING = "building"
    READY = "ready"
    RETIRED = "retired"
    FAILED = "failed"


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable Spec and Bundle, numbered per Function."""

    function: str
    number: int
    spec: FunctionSpec
    bundle: Digest
    created_at: float  # unix seconds
    state: RevisionState = RevisionState.READY

    def __str__(self) -> str:
        return f"{self.function}@{self.number}"


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A named thing that can be invoked.

    `active` is what the user wants to run. `serving` is where calls go: it follows `active` once a worker of the new
    revision is READY, so a deploy never turns warm calls into cold ones, nor into failures when it cannot start.
    `min_workers` and `max_workers`, when set (`gpufn scale`), take the place of the spec's.
    """

    name: str
    active: int
    serving: int
    latest: int
    updated_at: float  # unix seconds
    min_workers: int | None = None
    max_workers: int | None = None
