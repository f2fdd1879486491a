"""Scopes of secrets: which secret a function gets. Pure.

    prod/search/*   an app of an environment
    prod/*          an environment
    *               every function

A function gets the secret of the most specific scope. `Revision.secret_scopes` bounds how wide it may be, so a function
never falls back to a secret that its deployer could not use.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Final, NamedTuple

from gpufn_core.errors import InvalidInput, InvalidSpec
from gpufn_core.spec.naming import names
from gpufn_core.spec.naming.patterns import ALL

_GROUP: Final = names.GROUP.pattern
SCOPE: Final = re.compile(rf"\*|{_GROUP}/\*|{_GROUP}/(?!(?:{'|'.join(sorted(names.RESERVED_APPS))})/){_GROUP}/\*")


class SecretRef(NamedTuple):
    """The identity of a secret. `scope` is the pattern of the functions that it is for."""

    name: str
    scope: str = ALL

    @property
    def key(self) -> str:
        """The key of its record.

        >>> SecretRef("TOKEN").key, SecretRef("TOKEN", "prod/search/*").key
        ('TOKEN', 'prod/search/TOKEN')
        """
        return self.scope.removesuffix(ALL) + self.name

    @property
    def arguments(self) -> str:
        """The arguments that name it on the command line.

        >>> SecretRef("TOKEN", "prod/search/*").arguments
        'TOKEN --env prod --app search'
        """
        groups = self.scope.split("/")[:-1]
        options = [f"--{option} {group}" for option, group in zip(("env", "app"), groups, strict=False)]
        return " ".join([self.name, *options])


def check_scope(scope: str) -> None:
    """Raise InvalidInput unless a secret may have this scope."""
    if SCOPE.fullmatch(scope) is None:
        raise InvalidInput(
            f"{scope[:100]!r} is not the scope of a secret: write prod/search/* for an app, prod/* for an "
            "environment, or * for every function",
            field="scope",
        )


def scope_of(env: str, app: str) -> str:
    """Return the scope of an app, of an environment, or of every function. Raises InvalidInput.

    >>> scope_of("prod", "search"), scope_of("prod", ""), scope_of("", "")
    ('prod/search/*', 'prod/*', '*')
    """
    if app and not env:
        raise InvalidInput("a secret of an app needs its environment as well", field="env")
    for field, kind, group in (("env", "environment", env), ("app", "app", app)):
        try:
            if group:
                names.check_group(kind, group)
        except InvalidSpec as error:
            raise InvalidInput(error.message, field=field) from None
    return "/".join(part for part in (env, app, ALL) if part)


def candidates(name: str, function: str, widest: str = ALL) -> list[SecretRef]:
    """Return the secrets of this name that a function can get, the most specific one first. None has a wider scope than
    `widest`.

    >>> [ref.key for ref in candidates("TOKEN", "prod/search/predict", "prod/*")]
    ['prod/search/TOKEN', 'prod/TOKEN']
    """
    env, app, _ = names.parts_of(function)
    scopes = [f"{env}/{app}/*", f"{env}/*", ALL]
    return [SecretRef(name, scope) for scope in scopes[: scopes.index(widest) + 1]] if widest in scopes else []


def effective(refs: Sequence[SecretRef], known: Container[str]) -> SecretRef | None:
    """Return the first secret whose key is known."""
    return next((ref for ref in refs if ref.key in known), None)
