"""The secrets that a principal may give to a function.

The code of a revision can read the secrets that it names. A principal may therefore use secrets whose scope its own
`deploy` scopes cover, and secrets of the active revision. The scope that was found at the deploy is stored as the
widest allowed scope (`Revision.secret_scopes`). If the secret is removed, the function does not fall back to a secret
that the principal could not use.
"""

from __future__ import annotations

import asyncio

from gpufn_core.domain.revision import Revision
from gpufn_core.errors import Forbidden, InvalidSpec
from gpufn_core.spec.function_spec import FunctionSpec
from gpufn_core.spec.naming.patterns import ALL
from gpufn_core.spec.naming.secret_scopes import SecretRef, candidates, effective
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import DEPLOY
from gpufn_gateway.functions.registry import Registry
from gpufn_platform.bus.storage.key_value import KeyValue


def check_secret_use(principal: Principal, registry: Registry, revision: Revision) -> None:
    """Raise Forbidden unless the principal may make this revision active."""
    active = registry.active_revision(revision.function)
    for name in revision.spec.secrets:
        refs = usable(revision, name)
        if not refs or refs[-1] not in _permitted(principal, active, revision.function, name):
            raise _forbidden(revision.function, name)


def check_secret_view(principal: Principal, revision: Revision) -> None:
    """Raise Forbidden unless the principal may give the function each secret that its workers can get. A terminal shows
    the values, so secrets of the active revision are no exception."""
    for name in revision.spec.secrets:
        for ref in usable(revision, name):
            if not principal.may_on_all(DEPLOY, ref.scope):
                raise Forbidden(
                    f"A terminal of {revision.function} shows the secret {name}, for which this request needs an API "
                    f"key with the scope '{DEPLOY}:{ref.scope}'."
                )


async def secret_scopes(
    principal: Principal, registry: Registry, secrets: KeyValue, spec: FunctionSpec
) -> dict[str, str]:
    """Return the widest scope of each secret of a spec that the principal deploys. Raises Forbidden; InvalidSpec if
    none of the secrets that it may use is set."""
    active = registry.active_revision(spec.name)
    permitted = {name: _permitted(principal, active, spec.name, name) for name in spec.secrets}
    for name, refs in permitted.items():
        if not refs:
            raise _forbidden(spec.name, name)
    keys = [ref.key for refs in permitted.values() for ref in refs]
    entries = await asyncio.gather(*map(secrets.get, keys))
    known = {key for key, entry in zip(keys, entries, strict=True) if entry is not None}
    scopes: dict[str, str] = {}
    missing: list[SecretRef] = []
    for name, refs in permitted.items():
        found = effective(refs, known)
        if found is None:
            missing.append(refs[0] if "/" in spec.name else refs[-1])  # no wider than needed
        else:
            scopes[name] = max((found, *_given(active, name)), key=refs.index).scope
    if missing:
        commands = "; ".join(f"gpufn secrets set {ref.arguments}" for ref in missing)
        named = ", ".join(ref.name for ref in missing)
        raise InvalidSpec(f"{spec.name} needs secrets that are not set: {named}. Run: {commands}")
    return scopes


def usable(revision: Revision, name: str) -> list[SecretRef]:
    """Return the secrets of this name that the workers of a revision can get, the most specific one first."""
    return candidates(name, revision.function, revision.secret_scopes.get(name, ALL))


def _permitted(principal: Principal, active: Revision | None, function: str, name: str) -> list[SecretRef]:
    """Return the secrets of this name that the principal may give to a function, the most specific one first."""
    given = _given(active, name)
    return [ref for ref in candidates(name, function) if ref in given or principal.may_on_all(DEPLOY, ref.scope)]


def _given(active: Revision | None, name: str) -> list[SecretRef]:
    """Return the secrets of this name that the active revision can get."""
    return usable(active, name) if active is not None and name in active.spec.secrets else []


def _forbidden(function: str, name: str) -> Forbidden:
    scope = candidates(name, function)[0].scope
    return Forbidden(f"To give {name} to {function}, this request needs an API key with the scope '{DEPLOY}:{scope}'.")
