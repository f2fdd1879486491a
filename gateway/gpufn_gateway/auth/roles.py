"""The role table: which scopes the groups of users have, and the workloads of other issuers. Pure.

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

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gpufn_core.encoding.urls import is_issuer
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.records import KeyLimits
from gpufn_gateway.auth import scopes
from gpufn_gateway.auth.quotas import check as check_limits


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
    def parse(cls, text: bytes, *, json: bool = False) -> Roles:
        """Parse a role table in TOML, or in JSON. Raises ValueError."""
        roles = msgspec.json.decode(text, type=cls) if json else msgspec.toml.decode(text, type=cls)
        try:
            for given in (*roles.groups.values(), *(workload.scopes for workload in roles.workloads)):
                for scope in given:
                    scopes.check(scope)
            check_limits(roles.limits)
            for workload in roles.workloads:
                if not is_issuer(workload.issuer):
                    raise InvalidInput(f"{workload.issuer!r} is no issuer: use an https address without a query")
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
