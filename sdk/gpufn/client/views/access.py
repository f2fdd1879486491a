"""Keys, users, teams, secrets, signers and the audit log (docs/http.md)."""

from __future__ import annotations

import msgspec

from gpufn_core.domain.team import Team, TeamUse
from gpufn_core.protocol.records import KeyLimits


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """An API key. `key`, its secret, is only in the response that creates or rotates it. `expires_at`,
    `last_used_at` (up to five minutes late) and `replaced_until`, until when the previous secret is valid, are in UNIX
    seconds. The verbs of a key with a `team` hold for the functions of the team."""

    id: str
    scopes: tuple[str, ...] = ()
    label: str = ""
    created_at: float | None = None
    limits: KeyLimits = KeyLimits()
    team: str = ""
    expires_at: float | None = None
    replaced_until: float | None = None
    last_used_at: float | None = None
    key: str | None = None


class ProviderView(msgspec.Struct, frozen=True, kw_only=True):
    """The OpenID provider of `gpufn login`. `scopes` are the scopes to request; "" leaves the choice
    to the client."""

    issuer: str
    client_id: str
    client_secret: str = ""
    scopes: str = ""


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """A new token, and the id and name of its principal. `expires_at` is in UNIX seconds of the gateway's clock."""

    token: str
    id: str
    name: str = ""
    scopes: tuple[str, ...] = ()
    expires_at: float = 0.0
    expires_in_s: float = 0.0


class PrincipalView(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request: an API key, a user, or, with an empty `id`, a client of a gateway without keys."""

    id: str = ""
    name: str = ""
    scopes: tuple[str, ...] = ()
    expires_at: float | None = None
    limits: KeyLimits | None = None


class UserView(msgspec.Struct, frozen=True, kw_only=True):
    """A user or a workload that has logged in. The last login was at `seen_at` in UNIX seconds, with `scopes`.
    `generation` counts how often the user's tokens were ended."""

    id: str
    issuer: str
    subject: str
    name: str = ""
    scopes: tuple[str, ...] = ()
    seen_at: float = 0.0
    generation: int = 0


class AuditHead(msgspec.Struct, frozen=True, kw_only=True):
    """The last record of the audit log: its number, hash and time in UNIX seconds."""

    seq: int
    hash: str
    at: float


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    """Records of the audit log as stored: the JSON of an `AuditRecord` each. `head` is None for an empty log."""

    records: tuple[msgspec.Raw, ...] = ()
    head: AuditHead | None = None


class SecretView(msgspec.Struct, frozen=True, kw_only=True):
    """A secret, without its value. `scope` is the pattern of its functions, `functions` are the functions that receive
    it."""

    name: str
    version: int
    updated_at: float
    scope: str = "*"
    functions: tuple[str, ...] = ()


class TeamView(Team, frozen=True, kw_only=True):
    """A team, with its present usage; `run_s` and `gpu_s` today."""

    use: TeamUse


class SignerView(msgspec.Struct, frozen=True, kw_only=True):
    """A key that is trusted to sign functions that match `patterns`. `functions` are the functions whose active
    revision it signed."""

    name: str
    id: str
    patterns: tuple[str, ...]
    added_at: float
    functions: tuple[str, ...] = ()


class SigningView(msgspec.Struct, frozen=True, kw_only=True):
    """The trusted keys, and the environments that require signatures."""

    keys: tuple[SignerView, ...] = ()
    required: tuple[str, ...] = ()
