"""The secrets that a principal may give to a function."""

from __future__ import annotations

from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import DEPLOY
from gpufn_gateway.functions.registry import Registry


def check_secret_use(principal: Principal, registry: Registry, spec: FunctionSpec) -> None:
    """Raise Forbidden unless the principal may make a revision with this spec active.

    Secrets belong to no function, and the code of a revision can read those that it names. A key whose scope has a
    pattern may therefore use only those that the active revision has.
    """
    function = registry.functions.get(spec.name)
    active = None if function is None else registry.revisions.get(spec.name, {}).get(function.active)
    if set(spec.secrets) - set(() if active is None else active.spec.secrets):
        principal.require(DEPLOY)
