"""Existing names like a missing one, for error messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from gpufn.cli.terminal.command import connect
from gpufn.client.may_read import may_read
from gpufn_core.errors import DataNotFound, FunctionNotFound, GpufnError
from gpufn_core.spec.naming.names import parts_of

if TYPE_CHECKING:
    from gpufn.client.client import Client

_MISSING: Final = re.compile(r"no (function|volume|queue|dict) '?([^'\s:]+)")
_EXISTING: Final[dict[str, Callable[[Client], Iterable[Any]]]] = {
    "function": lambda client: client.functions(),
    "volume": lambda client: client.volumes(),
    "queue": lambda client: client.queues(),
    "dict": lambda client: client.dicts(),
}


def with_similar_name(error: GpufnError, message: str) -> str:
    """Append an existing name like the one that `error` misses, or how to find the names, to its message."""
    match = _MISSING.search(error.message)
    if match is None or not isinstance(error, FunctionNotFound | DataNotFound):
        return message
    kind, missing = match.groups()
    if (names := _existing(kind)) is None:
        return message
    message = message.rstrip(".")
    if not names:
        return f"{message}; none is deployed: see `gpufn deploy --help`" if kind == "function" else message
    if similar := similar_name(missing, names):
        return f"{message.partition(':')[0]}; did you mean {similar!r}?"
    return f"{message}; see `gpufn ls`" if kind == "function" else message


def similar_name(missing: str, names: Iterable[str]) -> str | None:
    """Return the name that is spelled like `missing`, as a full name or without its environment and app.

    >>> similar_name("job", ["prod/search/jobs"]), similar_name("prod/search/job", ["prod/search/jobs"])
    ('prod/search/jobs', 'prod/search/jobs')
    """
    spelled = {parts_of(name).base: name for name in names} | {name: name for name in names}
    similar = difflib.get_close_matches(missing, spelled, n=1)
    return spelled[similar[0]] if similar else None


def _existing(kind: str) -> list[str] | None:
    """Return the names of all objects of a kind; None if they cannot be read."""
    try:
        with connect() as client:
            return [each.name for each in _EXISTING[kind](client)] if may_read(client) else None
    except GpufnError:
        return None
