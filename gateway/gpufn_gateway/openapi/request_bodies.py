"""The JSON bodies of management requests, for the routes that decode them and for the OpenAPI document. Pure."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

import msgspec

from gpufn_core.domain.devices.engine import CPU_KIND
from gpufn_core.domain.revision import Lease, Source
from gpufn_core.domain.team import TeamLimits
from gpufn_core.domain.traffic import (
    MAX_HEADER_RULES,
    MAX_MIN_CALLS,
    MAX_RETURN_RULES,
    MAX_WINDOW_S,
    MIN_WINDOW_S,
    WHOLE,
    HeaderRule,
    Mirror,
)
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.profiles import LONGEST_GPU_PROFILE_S, LONGEST_PROFILE_S, LONGEST_WAIT_S, ProfileKind
from gpufn_core.protocol.records import KeyLimits
from gpufn_core.signing.statement import DeploySignature
from gpufn_core.spec.isolation import Isolation
from gpufn_core.spec.model_spec import ModelSpec
from gpufn_core.spec.priority import Priority
from gpufn_core.spec.schedule import Missed, Schedule

MIN_DELAY_S: Final = 0.001  # a smaller delay would be lost when added to the time in unix seconds
MAX_DELAY_S: Final = 366 * 86400.0
MAX_SECRET_BYTES: Final = 64 << 10
MAX_DIGESTS: Final = 1000  # files that one request asks for
MAX_SIGNER_PATTERNS: Final = 100  # per trusted key
MAX_LABEL_LENGTH: Final = 200  # characters
MAX_OWNED: Final = 100  # patterns of a team
MIN_WEIGHT: Final = 0.001
MAX_WEIGHT: Final = 1000.0
MAX_HELD: Final = 1_000_000  # workers or GPUs of a team
MIN_KEY_S: Final = 1.0  # the shortest life of a key, in seconds
MIN_LEASE_S: Final = 1.0
MAX_LEASE_S: Final = 3600.0
MAX_KEY_S: Final = 315_360_000.0  # ten years: the longest life of a key, and overlap of a rotation


class LeaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lease of a temporary function, in a deploy and in a renewal."""

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    ttl_s: Annotated[float, msgspec.Meta(ge=MIN_LEASE_S, le=MAX_LEASE_S)]

    def lease(self) -> Lease:
        return Lease(self.id, self.ttl_s)


class Deploy(msgspec.Struct, forbid_unknown_fields=True):
    spec: msgspec.Raw
    bundle: str
    check: bool = True
    source: Source | None = None
    replace: bool = False
    code: Annotated[str, msgspec.Meta(max_length=128)] = ""
    deploy_id: Annotated[str, msgspec.Meta(max_length=26)] = ""
    signature: DeploySignature | None = None
    lease: LeaseRequest | None = None
    traffic: Annotated[int, msgspec.Meta(ge=1, le=WHOLE - 1)] | None = None


class Rollback(msgspec.Struct, forbid_unknown_fields=True):
    revision: int | None = None


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A split of a function's calls. `weights` are in percent, by revision; without them the serving revision has all.
    `return_if` has rules such as ``errors>2%`` and ``p99>1.5x``."""

    weights: dict[int, int] = {}
    headers: Annotated[tuple[HeaderRule, ...], msgspec.Meta(max_length=MAX_HEADER_RULES)] = ()
    mirror: Mirror | None = None
    return_if: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_RETURN_RULES)] = ()
    window_s: Annotated[float, msgspec.Meta(ge=MIN_WINDOW_S, le=MAX_WINDOW_S)] = 60.0
    min_calls: Annotated[int, msgspec.Meta(ge=1, le=MAX_MIN_CALLS)] = 50


class Scale(msgspec.Struct, forbid_unknown_fields=True):
    min_workers: int | msgspec.UnsetType | None = msgspec.UNSET
    max_workers: int | msgspec.UnsetType | None = msgspec.UNSET


class Profile(msgspec.Struct, forbid_unknown_fields=True):
    """A profile of one worker: `worker`; or the worker that runs `call`; or the first worker in the next `wait_s` whose
    call runs for `slower_than_s`; or any worker. `idle`: also threads that wait. The profile of a GPU is Chrome's JSON,
    compressed by gzip, in each `format`."""

    kind: ProfileKind = ProfileKind.CPU
    seconds: float = 10.0
    worker: str = ""
    call: str = ""
    slower_than_s: float = 0.0
    wait_s: float = 60.0
    idle: bool = False
    format: Literal["speedscope", "folded"] = "speedscope"

    def __post_init__(self) -> None:
        longest_s = LONGEST_GPU_PROFILE_S if self.kind is ProfileKind.GPU else LONGEST_PROFILE_S
        if not 1 <= self.seconds <= longest_s:
            raise ValueError(f"seconds must be from 1 to {longest_s:g}")
        if not 0 <= self.wait_s <= LONGEST_WAIT_S:
            raise ValueError(f"wait_s must be from 0 to {LONGEST_WAIT_S:g}")
        if not 0 <= self.slower_than_s < math.inf:
            raise ValueError("slower_than_s must be a positive number")
        if sum(map(bool, (self.worker, self.call, self.slower_than_s))) > 1:
            raise ValueError("only one of worker, call and slower_than_s can choose the worker")


class NewSchedule(msgspec.Struct, forbid_unknown_fields=True):
    """A new schedule, with exactly one of `cron`, `at` (unix seconds) and `in_s`."""

    function: str
    cron: str | None = None
    at: float | None = None
    in_s: float | None = None
    timezone: str = "UTC"
    missed: Missed = Missed.ONCE
    method: str = ""
    arguments: dict[str, Any] = {}
    priority: Priority | None = None

    def schedule(self, now: float) -> Schedule:
        """Convert to a Schedule. Raises InvalidInput, InvalidSpec."""
        if sum(value is not None for value in (self.cron, self.at, self.in_s)) != 1:
            raise InvalidInput("send exactly one of cron, at and in_s", field="cron")
        at = self.at
        if self.in_s is not None:
            if not MIN_DELAY_S <= self.in_s <= MAX_DELAY_S:
                raise InvalidInput(f"in_s must be at least {MIN_DELAY_S} and at most a year", field="in_s")
            at = now + self.in_s
        elif at is not None and not now < at <= now + MAX_DELAY_S:
            raise InvalidInput("at must be in unix seconds, between now and a year from now", field="at")
        return Schedule(self.cron or "", self.timezone, self.arguments, self.method, self.missed, at, self.priority)


class NewBuild(msgspec.Struct, forbid_unknown_fields=True):
    model: ModelSpec
    device: Annotated[str, msgspec.Meta(max_length=200)] = CPU_KIND  # limited because part of it goes into a subject


class NewSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: str


class FileDigests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files by their sha256."""

    digests: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_DIGESTS)]


class NewTeam(msgspec.Struct, forbid_unknown_fields=True):
    owns: tuple[str, ...]
    weight: float = 1.0
    limits: TeamLimits = TeamLimits()
    isolation: Isolation = Isolation.PROCESS
    callers: tuple[str, ...] = ()
    trust_domains: tuple[str, ...] = ()


class NewSigner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public_key: str
    patterns: tuple[str, ...] = ("*",)


class RequireSignatures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    force: bool = False


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    scopes: tuple[str, ...]
    label: str = ""
    limits: KeyLimits = KeyLimits()
    expires_in_s: float | None = None
    team: str = ""


class KeyRotation(msgspec.Struct, forbid_unknown_fields=True):
    overlap_s: float = 0.0


class TokenRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request for a token, in exchange for the API key or token of the request, or for a JSON Web Token. Without
    `scopes`, the token has all that it can have."""

    jwt: str = ""
    scopes: tuple[str, ...] | None = None
    expires_in_s: float | None = None


class Collect(msgspec.Struct, forbid_unknown_fields=True):
    dry_run: bool = False
