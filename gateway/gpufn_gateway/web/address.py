"""The function that a path under `/web/` names. Pure."""

from __future__ import annotations

from typing import NamedTuple

from gpufn_core.spec.naming.names import ANY, DEFAULT, full_name, function_name, is_group_or_any
from gpufn_core.spec.web_spec import PREFIX

_PARTS = 3


class Address(NamedTuple):
    """`name` is the function as callers write it. `root` is the path up to the function, `rest` the remaining path."""

    name: str
    root: str
    rest: str

    @property
    def public_name(self) -> str:
        """The full name, with `default` for parts that the path leaves out. It does not depend on the caller."""
        env, app, base = self.name.split("/")
        env, app = (DEFAULT if part == ANY else part for part in (env, app))
        return full_name(env, app, function_name(base))


def address_of(path: str) -> Address | None:
    """Return the address, or None for a path that names no function.

    >>> address_of("/web/prod/shop/site/a/b")
    Address(name='prod/shop/site', root='/web/prod/shop/site', rest='/a/b')
    >>> address_of("/web/-/-/site").public_name, address_of("/web/site")
    ('site', None)
    """
    parts = path.removeprefix(PREFIX).split("/", _PARTS)
    if not path.startswith(PREFIX) or len(parts) < _PARTS:
        return None
    env, app, base = parts[:_PARTS]
    if not (is_group_or_any(env) and is_group_or_any(app) and base):
        return None
    name = f"{env}/{app}/{base}"
    root = PREFIX + name
    return Address(name, root, path[len(root) :])
