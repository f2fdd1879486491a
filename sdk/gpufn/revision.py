"""Functions and Revisions as the platform stores them, and a Revision's states."""

from __future__ import annotations

import enum

import msgspec

from gpufn.errors import ErrorInfo
from gpufn.ids import Digest
from gpufn.spec import FunctionSpec

RevisionKey = tuple[str, int]  # function and number


class RevisionState(enum.StrEnum):
    BUILDING = "building"
    READY = "ready"
    RETIRED = "retired"
    FAILED = "failed"


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """Immutable Spec, Bundle and Engines, numbered per Function.

    `builds` are the Builds that a BUILDING revision waits for. `engines` is complete when it is READY: the parameter of
    each model → DeviceKind → EngineKeys, the best first. A FAILED one says why in `error`. A RETIRED one can be neither
    called nor rolled back to, and goes once nothing runs it; the newest's number stays, with a bundle named "".
    """

    function: str
    number: int
    spec: FunctionSpec
    bundle: Digest
    created_at: float  # unix seconds
    state: RevisionState = RevisionState.READY
    builds: tuple[str, ...] = ()
    engines: dict[str, dict[str, tuple[str, ...]]] = {}
    error: ErrorInfo | None = None
    retired_at: float | None = None  # unix seconds

    def __str__(self) -> str:
        return f"{self.function}@{self.number}"

    @property
    def key(self) -> RevisionKey:
        return self.function, self.number

    @property
    def device_kinds(self) -> frozenset[str] | None:
        """The DeviceKinds that there are engines for, of every model; None without models: then any will do."""
        if not self.spec.models:
            return None
        kinds = [self.engines.get(model.parameter, {}).keys() for model in self.spec.models]
        return frozenset(kinds[0]).intersection(*kinds[1:])


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
