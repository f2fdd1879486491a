"""Functions and revisions as the platform stores them, and the states of a revision."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec

from gpufn_core.domain.traffic import Returned, Split
from gpufn_core.errors import ErrorInfo
from gpufn_core.ids import Digest
from gpufn_core.signing.statement import DeploySignature
from gpufn_core.spec.function_spec import FunctionSpec

_Name = Annotated[str, msgspec.Meta(max_length=1024)]
RevisionKey = tuple[str, int]  # function and number


class RevisionState(enum.StrEnum):
    BUILDING = "building"
    READY = "ready"
    RETIRED = "retired"
    FAILED = "failed"


class CheckState(enum.StrEnum):
    PENDING = "pending"
    PASSED = "passed"
    FAILED = "failed"
    UNCHECKED = "unchecked"  # no worker could be started for the check


class Check(msgspec.Struct, frozen=True):
    """The start of a worker that a deploy waits for before calls go to its revision. `reason`: why no worker
    started."""

    state: CheckState
    reason: str = ""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The origin of a deploy. `file` is relative to its project; `project` is the name of the project's folder, and
    `project_id` distinguishes projects of the same name. `deployer` is user@host as sent by the client; `key` is the id
    of the API key. `code` is a digest of the function's own code and of the project modules that it imports
    (`gpufn.deploy.deployed_code`); "" if no file declares the function."""

    file: _Name
    project: _Name
    project_id: _Name
    deployer: _Name = ""
    key: str = ""
    code: _Name = ""

    def __str__(self) -> str:
        return f"{self.file or 'a notebook'} of the project {self.project or '/'}"

    def is_same_file(self, other: Source) -> bool:
        return (self.file, self.project_id) == (other.file, other.project_id)


class Lease(msgspec.Struct, frozen=True):
    """The right of a temporary function to exist. Its holder, who knows `id`, renews it. After `ttl_s` seconds
    without a renewal the function is deleted."""

    id: str
    ttl_s: float
    renewed_at: float = 0.0  # unix seconds

    def has_expired(self, now: float, leading_since: float) -> bool:
        """Return whether the function can be deleted. A controller that leads since a moment ago waits another `ttl_s`,
        because the lease could not be renewed while no gateway ran."""
        return now - max(self.renewed_at, leading_since) > self.ttl_s


class Variant(msgspec.Struct, frozen=True, omit_defaults=True):
    """The difference between a variant and its function. `revision` is the function's revision that the variant copies,
    `parameters` are the parameters of its instance, and `options` replace options of the spec. `original` is the
    function's spec if it was signed and the options change it. A terminal is a variant with one worker, which runs a
    command."""

    revision: int
    parameters: dict[str, Any] = {}
    options: dict[str, Any] = {}
    original: FunctionSpec | None = None
    is_terminal: bool = False


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """A FunctionSpec with its bundle and engines; immutable, and numbered per function.

    `builds` are the builds that a BUILDING revision waits for. `engines` is complete once the revision is READY:
    parameter of the model → DeviceKind → EngineKeys, the best first. `error` is why a FAILED revision failed. A RETIRED
    revision can be neither called nor rolled back to, and is deleted once nothing runs it. The record of the newest
    revision keeps its number, with a bundle named "". `check` is None for a deploy without a check. A revision whose
    check failed is FAILED. `source` is None if the client did not send it. `code` is the client's digest of the
    function's own code: deploying the same code in another bundle creates no new revision. `deploy_id` is common to the
    revisions of one deploy. `signature` is None for an unsigned deploy. `secret_scopes` has the widest scope that each
    secret may have (`gpufn_core.spec.naming.secret_scopes`); a secret without one may have any. `lease` is the lease of
    its function when the revision becomes active; None makes the function permanent. A revision of a variant has the
    spec of its function, with the options of the variant; `spec.name` names the function.
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
    check: Check | None = None
    source: Source | None = None
    code: str = ""
    deploy_id: str = ""
    signature: DeploySignature | None = None
    secret_scopes: dict[str, str] = {}
    lease: Lease | None = None
    variant: Variant | None = None

    def __str__(self) -> str:
        return f"{self.function}@{self.number}"

    @property
    def key(self) -> RevisionKey:
        return self.function, self.number

    @property
    def is_checked_first(self) -> bool:
        """Whether a worker has to start before calls go to this revision."""
        pending = self.check is not None and self.check.state is CheckState.PENDING
        return pending and self.state is RevisionState.READY

    @property
    def engine_keys(self) -> set[str]:
        """The EngineKeys of all models on all kinds of devices."""
        return {key for devices in self.engines.values() for keys in devices.values() for key in keys}

    @property
    def device_kinds(self) -> frozenset[str] | None:
        """The DeviceKinds with an engine for every model; None without models, which means that any kind will do."""
        if not self.spec.models:
            return None
        kinds = [self.engines.get(model.parameter, {}).keys() for model in self.spec.models]
        return frozenset(kinds[0]).intersection(*kinds[1:])


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A named thing that can be invoked.

    `active` is the revision that the user wants to run. `serving` is the revision that receives calls. It follows
    `active` once a worker of the new revision is READY. So a deploy neither turns warm calls into cold ones nor causes
    failures if the new revision cannot start. `min_workers` and `max_workers` (`gpufn scale`) override the spec's.
    `lease` is None for a permanent function. `traffic` divides the calls between revisions (`gpufn traffic`); without
    it all calls go to the serving one. `returned` is the last automatic return, until the split is set again.
    """

    name: str
    active: int
    serving: int
    latest: int
    updated_at: float  # unix seconds
    min_workers: int | None = None
    max_workers: int | None = None
    lease: Lease | None = None
    traffic: Split | None = None
    returned: Returned | None = None

    @property
    def called(self) -> set[int]:
        """The revisions that receive calls, and the active one."""
        return {self.active, self.serving, *(() if self.traffic is None else self.traffic.called)}
