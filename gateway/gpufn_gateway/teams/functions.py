"""The number of functions of a team. Variants do not count: `max_variants` bounds them."""

from __future__ import annotations

from gpufn_core.domain.team import Team
from gpufn_core.errors import Conflict
from gpufn_core.spec.naming.variant_names import is_variant
from gpufn_gateway.functions.registry import Registry


class FunctionLimitExceeded(Conflict):
    """A deploy would exceed the number of functions of its team."""

    retryable = False


def functions_of(team: Team, registry: Registry) -> int:
    """Return the number of functions that a team has, or builds."""
    named = registry.functions.keys() | {name for name in registry.revisions if registry.is_being_built(name)}
    return sum(not is_variant(name) and registry.teams.name_of(name) == team.name for name in named)


def check_functions(function: str, registry: Registry) -> None:
    """Raise FunctionLimitExceeded if a deploy of a new function would exceed the limit of its team. Deploys at the same
    time can exceed the limit together."""
    team = registry.teams.of(function)
    if team is None or function in registry.functions or registry.is_being_built(function):
        return
    if (existing := functions_of(team, registry)) >= team.max_functions:
        raise FunctionLimitExceeded(
            f"The team {team.name} may have {team.max_functions:,} functions, and has {existing:,}: delete functions "
            "that the team does not need (gpufn rm), or ask for a higher limit (gpufn teams set --functions)."
        )
