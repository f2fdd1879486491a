"""Teams: the functions that they own, and their limits and weights."""

from __future__ import annotations

import msgspec

from gpufn_core.spec import patterns
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.isolation import LEAST, Isolation

NO_TEAM = ""


def domain_of(trust_domain: str, team: str) -> str:
    """Return the trust domain in which a function shares GPUs and templates: the one that it names, or one of its team
    alone. So functions of two teams share only if both name the same domain. No user can name a domain with a slash.

    >>> domain_of("", "search"), domain_of("ours", "search"), domain_of("", "")
    ('team/search', 'ours', '')
    """
    return trust_domain or (f"team/{team}" if team else "")


class TeamLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The limits of all functions of a team together; None means no limit. `workers` and `gpus` are held at the same
    time; a quarter of a GPU counts 0.25, and parked workers do not count. `queued` are submitted calls that have not
    ended. `run_s` and `gpu_s` are seconds per UTC day, as `gpufn_core.domain.usage` counts them. `stored_bytes` are the
    bundles, models, weights and engines that its functions keep in the object store."""

    workers: int | None = None
    gpus: float | None = None
    queued: int | None = None
    run_s: float | None = None
    gpu_s: float | None = None
    stored_bytes: int | None = None


class TeamUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a team uses of its TeamLimits. `borrowed_gpus` are those beyond its part by weight."""

    workers: int = 0
    gpus: float = 0.0
    borrowed_gpus: float = 0.0
    queued: int = 0
    run_s: float = 0.0
    gpu_s: float = 0.0
    stored_bytes: int = 0


class Team(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A team owns the functions that match one of the patterns `owns`. The patterns of two teams do not overlap.

    Teams that compete for room get GPU seconds in proportion to `weight`. Its functions need the tier `isolation` or a
    stronger one. Besides its own functions, those that match one of the patterns `callers` may call them from a worker.
    """

    name: str
    owns: tuple[str, ...]
    weight: float = 1.0
    limits: TeamLimits = TeamLimits()
    isolation: Isolation = Isolation.PROCESS
    callers: tuple[str, ...] = ()

    def has(self, function: str) -> bool:
        """Return whether the team owns a function."""
        return any(patterns.matches(pattern, function) for pattern in self.owns)

    def accepts(self, spec: FunctionSpec) -> bool:
        """Return whether a function of the team may have this isolation."""
        return LEAST.index(spec.least_isolation) >= LEAST.index(self.isolation)


class Teams:
    """The teams by name, and the team of each function."""

    def __init__(self) -> None:
        self._teams: dict[str, Team] = {}
        self._names: dict[str, str] = {}  # of the teams, by function

    def __len__(self) -> int:
        return len(self._teams)

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

    def may_call(self, caller: str, function: str) -> bool:
        """Return whether the code of the function `caller` may call another function, by their full names. A function
        that no team owns is for all.

        >>> teams = Teams()
        >>> teams.put(Team(name="ads", owns=("prod/ads/*",), callers=("prod/search/rank",)))
        >>> [teams.may_call(caller, "prod/ads/bid") for caller in ("prod/ads/a", "prod/search/rank", "prod/search/b")]
        [True, True, False]
        """
        team = self._teams.get(self.name_of(function))
        return team is None or team.has(caller) or any(patterns.matches(each, caller) for each in team.callers)

    def conflict(self, team: Team) -> tuple[str, str] | None:
        """Return another team, and its pattern that overlaps one of `team`; None if there is none."""
        for other in self.all():
            for owned in other.owns if other.name != team.name else ():
                if any(patterns.overlap(owned, pattern) for pattern in team.owns):
                    return other.name, owned
        return None
