"""Short names of volumes, queues and dicts: `models` means the only volume whose name ends in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from gpufn.cli.terminal.output import WrongUsage
from gpufn.client.may_read import may_read
from gpufn_core.errors import AmbiguousFunction, FunctionNotFound
from gpufn_core.spec.naming.names import DEFAULT, Home, Names, canonical, in_environment, parts_of

if TYPE_CHECKING:
    from gpufn.client.client import Client


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def full_name(client: Client, name: str, existing: Callable[[], Sequence[_Named]]) -> str:
    """Return the full name of the object that `name` means, or `name` if it means none. A full name is not looked up.
    Raises WrongUsage if it can mean several."""
    if name.count("/") > 1 or not may_read(client):
        return name
    env = client.environment
    try:
        return Names(each.name for each in existing()).find(in_environment(name, env) if env else name, _home(client))
    except FunctionNotFound:
        return name
    except AmbiguousFunction as error:
        raise WrongUsage(error.message, field="name") from None


def name_for_writing(client: Client, name: str, existing: Callable[[], Sequence[_Named]]) -> str:
    """Return the full name of the object that `name` means at the client's home, which may be new. Raises WrongUsage if
    there is none there but `name` is the short name of an object elsewhere: the caller must choose."""
    if (meant := full_name(client, name, existing)) == name:
        return name
    own = canonical(in_environment(name, _home(client).env))
    if meant != own:
        new = "/".join(parts_of(own))
        raise WrongUsage(f"{own} does not exist, but {meant} does: write {meant}, or {new} for a new one")
    return own


def _home(client: Client) -> Home:
    return Home(client.environment or DEFAULT)
