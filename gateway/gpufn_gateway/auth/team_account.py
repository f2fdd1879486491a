"""The account of a team: its limits for calls, which are counted as for an API key. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from gpufn_core.domain.team import Team
from gpufn_core.protocol.records import KeyLimits

_PREFIX: Final = "team/"


class TeamAccount(msgspec.Struct, frozen=True):
    """`id` is no id of an API key, which has no slash."""

    id: str
    limits: KeyLimits


def quota_id(team: str) -> str:
    return f"{_PREFIX}{team}"


def team_of(id_: str) -> str:
    """Return the team with this account, or "" for a key or a user.

    >>> team_of("team/search"), team_of("k1")
    ('search', '')
    """
    return id_.removeprefix(_PREFIX) if id_.startswith(_PREFIX) else ""


def account_of(team: Team) -> TeamAccount | None:
    """Return the account of a team; None if it has no limits for calls."""
    limits = KeyLimits(queued=team.limits.queued, run_s=team.limits.run_s, gpu_s=team.limits.gpu_s)
    return None if limits == KeyLimits() else TeamAccount(quota_id(team.name), limits)
