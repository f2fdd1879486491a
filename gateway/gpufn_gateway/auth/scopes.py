"""Scopes of API keys: the allowed actions, and the functions to which they apply. Pure.

admin                everything
hi, pickle           calls of class `hi`, pickled arguments; of the functions that the key may invoke
invoke:P             calls of the functions that the pattern P names (`gpufn_core.spec.naming.patterns`)
read:P, deploy:P     views and changes of these functions; deploy:P includes read:P
exec:P               terminals in workers of these functions
read, deploy         views and changes of all functions, and of what belongs to no function
exec                 terminals in workers of all functions

A function is visible to a key if one of its scopes names it. The answers about patterns are cached by scopes and
function. Keys with the same scopes share them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

from gpufn_core.errors import InvalidInput
from gpufn_core.spec.naming import patterns

ADMIN, DEPLOY, READ, INVOKE, EXEC, HI, PICKLE = "admin", "deploy", "read", "invoke", "exec", "hi", "pickle"
INVOKE_ALL: Final = f"{INVOKE}:{patterns.ALL}"
SCOPES: Final = (ADMIN, DEPLOY, READ, INVOKE_ALL, EXEC, HI, PICKLE)
VERBS: Final = (INVOKE, READ, DEPLOY, EXEC)  # each may have a pattern
_GIVEN_BY: Final = {INVOKE: (INVOKE,), READ: (READ, DEPLOY), DEPLOY: (DEPLOY,), EXEC: (EXEC,)}
_UNPATTERNED: Final = {INVOKE: INVOKE_ALL, READ: READ, DEPLOY: DEPLOY, EXEC: EXEC}
_EVERY_FUNCTION: Final = frozenset({patterns.ALL, "*/*/*"})
_MAX_CACHED: Final = 10_000

Scopes = frozenset[str]


def check(scope: str) -> None:
    """Raise InvalidInput unless `scope` is a scope."""
    verb, colon, pattern = scope.partition(":")
    if scope in SCOPES or (colon and verb in VERBS and patterns.is_pattern(pattern)):
        return
    if colon and verb in VERBS:
        reason = (
            f"{pattern!r} is not a pattern of functions: use {verb}:ENV/* for an environment, {verb}:ENV/APP/* for an "
            f"app, {verb}:*/APP/* for an app in every environment, {verb}:ENV/APP/FUNCTION for one function, "
            f"{verb}:FUNCTION for one of default/default, or {_UNPATTERNED[verb]} for all functions"
        )
    else:
        reason = (
            f"{scope!r} is not a scope: use admin, deploy, read, exec, hi, pickle or invoke:*, or a verb with a "
            "pattern of functions, such as invoke:FUNCTION, read:ENV/* or deploy:ENV/APP/*"
        )
    raise InvalidInput(reason, field="scopes")


def check_of_team(scope: str) -> None:
    """Raise InvalidInput unless `scope` is a scope for a key of a team, whose patterns belong to the team."""
    if scope not in (DEPLOY, READ, INVOKE_ALL, EXEC, HI, PICKLE):
        raise InvalidInput(
            f"{scope!r} is not a scope for a key of a team: use deploy, read, invoke:*, exec, hi or pickle; they hold "
            "for the functions of the team",
            field="scopes",
        )


def of_team(scopes: Iterable[str], owned: Iterable[str]) -> list[str]:
    """Return the scopes of a team's key: each verb for the patterns that the team owns.

    >>> of_team(["deploy", "invoke:*", "hi"], ["prod/search/*"])
    ['deploy:prod/search/*', 'invoke:prod/search/*', 'hi']
    """
    found: list[str] = []
    for scope in scopes:
        verb = scope.partition(":")[0]
        found += [f"{verb}:{pattern}" for pattern in owned] if verb in VERBS else [scope]
    return found


def effective(scopes: Iterable[str]) -> Scopes:
    """Return the scopes as the checks read them: `read` and `deploy` omit a pattern that names every function.

    >>> sorted(effective(["read:*", "invoke:*/*/*", "deploy:dev/*"]))
    ['deploy:dev/*', 'invoke:*', 'read']
    """
    return frozenset(map(_effective, scopes))


def _effective(scope: str) -> str:
    verb, _, pattern = scope.partition(":")
    return _UNPATTERNED[verb] if verb in VERBS and pattern in _EVERY_FUNCTION else scope


def has_everywhere(scopes: Scopes, scope: str) -> bool:
    """Return whether `scope` holds without a pattern. `deploy` includes `read`."""
    return ADMIN in scopes or scope in scopes or (scope == READ and DEPLOY in scopes)


def sees_all(scopes: Scopes) -> bool:
    """Return whether every function is visible."""
    return not scopes.isdisjoint((ADMIN, DEPLOY, READ, INVOKE_ALL, EXEC))


@functools.lru_cache(maxsize=_MAX_CACHED)
def has_on(scopes: Scopes, verb: str, function: str) -> bool:
    """Return whether the scopes allow `verb` on the function with this full name.

    >>> has_on(frozenset({"deploy:prod/search/*"}), READ, "prod/search/predict")
    True
    """
    everywhere = {ADMIN} | {_UNPATTERNED[each] for each in _GIVEN_BY[verb]}
    return not scopes.isdisjoint(everywhere) or any(
        patterns.matches(pattern, function) for pattern in _patterns(scopes, verb)
    )


@functools.lru_cache(maxsize=_MAX_CACHED)
def has_somewhere(scopes: Scopes, verb: str) -> bool:
    """Return whether the scopes allow `verb` on some functions, which need not exist."""
    return has_everywhere(scopes, _UNPATTERNED[verb]) or bool(_patterns(scopes, verb))


@functools.lru_cache(maxsize=_MAX_CACHED)
def is_visible(scopes: Scopes, function: str) -> bool:
    """Return whether the function exists for a key with these scopes."""
    return any(has_on(scopes, verb, function) for verb in VERBS)


def covers(scopes: Scopes, scope: str) -> bool:
    """Return whether the scopes allow all that `scope` allows.

    >>> own = frozenset({"deploy:prod/*", "hi"})
    >>> covers(own, "read:prod/search/*"), covers(own, "invoke:prod/search/*"), covers(own, "deploy")
    (True, False, False)
    """
    scope = _effective(scope)
    if has_everywhere(scopes, scope):
        return True
    verb, _, pattern = scope.partition(":")
    if not pattern:
        return False
    return has_everywhere(scopes, _UNPATTERNED[verb]) or any(
        patterns.includes(held, pattern) for held in _patterns(scopes, verb)
    )


def is_within(scopes: Scopes, verb: str, owned: Iterable[str]) -> bool:
    """Return whether one of the patterns for which the scopes allow `verb` lies within one of `owned`.

    >>> is_within(frozenset({"deploy:prod/search/predict"}), READ, ["prod/search/*"])
    True
    """
    return any(patterns.includes(outer, inner) for outer in owned for inner in _patterns(scopes, verb))


def _patterns(scopes: Scopes, verb: str) -> list[str]:
    """Return the patterns for which the scopes allow `verb`."""
    pairs = (scope.partition(":") for scope in scopes)
    return [pattern for given, _, pattern in pairs if given in _GIVEN_BY[verb] and pattern]
