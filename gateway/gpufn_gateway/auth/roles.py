"""The role table: which scopes the groups of users have, and the workloads of other issuers. Pure, except `RoleFile`.

[groups]
search-devs = ["deploy:*/search/*", "invoke:*/search/*"]
ops = ["admin"]

[[workloads]]
issuer = "https://token.actions.githubusercontent.com"
audience = "gpufn"
subject = "repo:acme/search:ref:refs/heads/main"     # * matches any text
scopes = ["deploy"]

[limits]                                             # of each user and workload, as of an API key
rate = 50
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.records import KeyLimits
from gpufn_gateway.auth import scopes
from gpufn_gateway.auth.quotas import check as check_limits
from gpufn_platform.process.settings import InvalidSetting

log = logging.getLogger(__name__)


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A program that has a token of an issuer, such as a CI job. In `subject`, `*` matches any text."""

    issuer: str
    audience: str
    subject: str
    scopes: tuple[str, ...]

    def matches(self, issuer: str, audiences: Iterable[str], subject: str) -> bool:
        """
        >>> job = Workload("https://ci", "gpufn", "repo:acme/*:ref:refs/heads/main", ("deploy",))
        >>> job.matches("https://ci", ["gpufn"], "repo:acme/search:ref:refs/heads/main")
        True
        >>> job.matches("https://ci", ["gpufn"], "repo:acme/search:ref:refs/heads/main-2")
        False
        """
        parts = map(re.escape, self.subject.split("*"))
        return (
            issuer == self.issuer
            and self.audience in audiences
            and re.fullmatch(".*".join(parts), subject, re.DOTALL) is not None
        )


class Roles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    groups: dict[str, tuple[str, ...]] = {}
    workloads: tuple[Workload, ...] = ()
    limits: KeyLimits = KeyLimits()

    @classmethod
    def parse(cls, text: bytes) -> Roles:
        """Parse a role table. Raises ValueError."""
        roles = msgspec.toml.decode(text, type=cls)
        try:
            for given in (*roles.groups.values(), *(workload.scopes for workload in roles.workloads)):
                for scope in given:
                    scopes.check(scope)
            check_limits(roles.limits)
        except InvalidInput as error:
            raise ValueError(error.message) from None
        return roles

    def scopes_of_groups(self, groups: Iterable[str]) -> set[str]:
        return {scope for group in groups for scope in self.groups.get(group, ())}

    def scopes_of_workload(self, issuer: str, audiences: Iterable[str], subject: str) -> set[str]:
        matching = (workload for workload in self.workloads if workload.matches(issuer, audiences, subject))
        return {scope for workload in matching for scope in workload.scopes}


def groups_in(claims: Mapping[str, Any], claim: str) -> list[str]:
    """Return the groups in a claim, which may be a path: a list of texts, or one text.

    >>> groups_in({"realm_access": {"roles": ["ops"]}}, "realm_access.roles"), groups_in({"groups": "ops"}, "groups")
    (['ops'], ['ops'])
    """
    value: Any = claims.get(claim)
    if value is None:
        value = claims
        for name in claim.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
    groups = [value] if isinstance(value, str) else value
    return [group for group in groups if isinstance(group, str)] if isinstance(groups, list) else []


class RoleFile:
    """The role table in a file, read again after the file has changed. Raises InvalidSetting if it is unusable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed_at = _changed_at(path)
        self._roles = _read(path)

    def roles(self) -> Roles:
        """Return the table as it is now; the last valid one if the file is unusable now."""
        changed_at = _changed_at(self._path)
        if changed_at != self._changed_at:
            self._changed_at = changed_at
            try:
                self._roles = _read(self._path)
            except InvalidSetting as error:
                log.error("the earlier role table stays in force: %s", error)
        return self._roles


def _changed_at(path: Path) -> int:
    """Return when a file was changed, in ns; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> Roles:
    try:
        return Roles.parse(path.read_bytes())
    except OSError as error:
        raise InvalidSetting(f"GPUFN_ROLE_FILE={path}: {error.strerror}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise InvalidSetting(f"GPUFN_ROLE_FILE={path}: {error}") from None
