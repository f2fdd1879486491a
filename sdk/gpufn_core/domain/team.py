"""Teams: the functions that they own, and their limits and weights."""

from __future__ import annotations

from typing import Final

import msgspec

from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.isolation import LEAST, Isolation
from gpufn_core.spec.naming import patterns

NO_TEAM = ""
MAX_FUNCTIONS: Final = 1_000  # for a team without its own limit


class TeamLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The limits of all functions of a team together; None means no limit, for `functions` MAX_FUNCTIONS.

    `workers` and `gpus` are held at the same time; a quarter of a GPU counts 0.25, and parked workers do not count.
    `queued` are submitted calls that have not ended. `run_s` and `gpu_s` are seconds per UTC day, as
    `gpufn_core.domain.usage` counts them. `stored_bytes` are the bundles, models, weights and engines that its
    functions keep in the object store."""

    workers: int | None = None
    gpus: float | None = None
    queued: int | None = None
    run_s: float | None = None
    gpu_s: float | None = None
    stored_bytes: int | None = None
    functions: int | None = None


class TeamUse(msgspec.Struct, frozen=True, kw_only=True):
    """A team's usage of its TeamLimits. `borrowed_gpus` are those beyond its part by weight."""

    workers: int = 0
    gpus: float = 0.0
    borrowed_gpus: float = 0.0
    queued: int = 0
    run_s: float = 0.0
    gpu_s: float = 0.0
    stored_bytes: int = 0
    functions: int = 0


class Team(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A team owns the functions that match one of the patterns `owns`. The patterns of two teams do not overlap.

    Teams that compete for room get GPU seconds in proportion to `weight`. Its functions need the tier `isolation` or a
    stronger one. In addition to its own functions, functions that match one of the patterns `callers` may call them
    from a worker. Its functions that name one of `trust_domains` also share GPUs with functions of the other teams that
    have the domain.
    """

    name: str
    owns: tuple[str, ...]
    weight: float = 1.0
    limits: TeamLimits = TeamLimits()
    isolation: Isolation = Isolation.PROCESS
    callers: tuple[str, ...] = ()
    trust_domains: tuple[str, ...] = ()

    @property
    def max_functions(self) -> int:
        return MAX_FUNCTIONS if self.limits.functions is None else self.limits.functions

    def has(self, function: str) -> bool:
        """Return whether the team owns a function."""
        return any(patterns.matches(pattern, function) for pattern in self.owns)

    def accepts(self, spec: FunctionSpec) -> bool:
        """Return whether a function of the team may have this isolation."""
        return LEAST.index(spec.least_isolation) >= LEAST.index(self.isolation)


def domain_of(trust_domain: str, team: Team | None) -> str:
    """Return the domain in which a function shares GPUs and templates, from its declared domain and its team. A
    deployer may name any domain, so a domain is common to several teams only if their records have it. No user can name
    a domain with a slash.

    >>> ads = Team(name="ads", owns=("prod/ads/*",), trust_domains=("ours",))
    >>> [domain_of(named, ads) for named in ("", "other", "ours")], domain_of("ours", None)
    (['team/ads', 'team/ads/other', 'shared/ours'], 'ours')
    """
    if team is None:
        return trust_domain
    if trust_domain in team.trust_domains:
        return f"shared/{trust_domain}"
    return f"team/{team.name}/{trust_domain}" if trust_domain else f"team/{team.name}"


class Teams:
    """The teams by name, and the team of each function."""

    def __init__(self) -> None:
        self._teams: dict[str, Team] = {}
        self._names: dict[str, str] = {}  # names of the teams, by function

    def __len__(self) -> int:
        return len(self._teams)

    def copy(self) -> Teams:
        """Return the teams as they are now, for another thread."""
        copied = Teams()
        copied._teams = dict(self._teams)
        return copied

    def put(self, team: Team) -> None:
        self._teams[team.name] = team
        self._names.clear()

    def remove(self, name: str) -> None:
        self._teams.pop(name, None)
        self._names.clear()

    def get(self, name: str) -> Team | None:
        return self._teams.get(name)

    def all(self) -> list[Team]:
        return sorted(self._teams.values(), key=lambda team: team.name)

    def name_of(self, function: str) -> str:
        """Return the name of the team that owns a function, by its full name; NO_TEAM if no team does."""
        if not self._teams:
            return NO_TEAM
        name = self._names.get(function)
        if name is None:
            name = self._names[function] = next((each.name for each in self.all() if each.has(function)), NO_TEAM)
        return name

    def of(self, function: str) -> Team | None:
        """Return the team that owns a function, by its full name."""
        return self._teams.get(self.name_of(function))

    def may_call(self, caller: str, function: str) -> bool:
        """Return whether the code of the function `caller` may call another function, by their full names. A function
        that no team owns is for all.

        >>> teams = Teams()
        >>> teams.put(Team(name="ads", owns=("prod/ads/*",), callers=("prod/search/rank",)))
        >>> [teams.may_call(caller, "prod/ads/bid") for caller in ("prod/ads/a", "prod/search/rank", "prod/search/b")]
        [True, True, False]
        """
        team = self.of(function)
        return team is None or team.has(caller) or any(patterns.matches(each, caller) for each in team.callers)

    def conflict(self, team: Team) -> tuple[str, str] | None:
        """Return another team, and its pattern that overlaps one of `team`; None if there is none."""
        for other in self.all():
            for owned in other.owns if other.name != team.name else ():
                if any(patterns.overlap(owned, pattern) for pattern in team.owns):
                    return other.name, owned
        return None
