"""The number of functions of a team. Variants do not count: `max_variants` bounds them."""

from __future__ import annotations

from collections import Counter

from gpufn_core.errors import Conflict
from gpufn_core.spec.naming.variant_names import is_variant
from gpufn_gateway.functions.registry import Registry


class FunctionLimitExceeded(Conflict):
    """A deploy would exceed the number of functions of its team."""

    retryable = False


def functions_by_team(registry: Registry) -> Counter[str]:
    """Count the functions that each team has, or builds."""
    existing = registry.functions.keys() | {name for name in registry.revisions if registry.is_being_built(name)}
    return Counter(registry.teams.name_of(name) for name in existing if not is_variant(name))


def check_functions(function: str, registry: Registry) -> None:
    """Raise FunctionLimitExceeded if a deploy of a new function would exceed the limit of its team. Deploys at the same
    time can exceed the limit together."""
    team = registry.teams.of(function)
    if team is None or function in registry.functions or registry.is_being_built(function):
        return
    if (existing := functions_by_team(registry)[team.name]) >= team.max_functions:
        raise FunctionLimitExceeded(
            f"The team {team.name} may have {team.max_functions:,} functions, and has {existing:,}: delete functions "
            "that the team does not need (gpufn rm), or ask for a higher limit (gpufn teams set --functions)."
        )
