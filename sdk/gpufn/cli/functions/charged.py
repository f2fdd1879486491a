"""The name that `gpufn usage` and `gpufn cost` charge a record to."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Final

from gpufn_core.spec.naming.names import parts_of
from gpufn_core.spec.naming.temporary_names import is_in_development, is_of_run
from gpufn_core.spec.naming.variant_names import function_of

if TYPE_CHECKING:
    from gpufn.client.client import Client

TEMPORARY: Final = "(temporary functions)"


def charged_to(name: str, existing: Container[str] = ()) -> str:
    """Return the function of a variant or a terminal, and one name for all functions of `gpufn run` and those that
    `gpufn serve` served before. Other names, and ENV/APP of an app, stay.

    >>> [charged_to(name) for name in ("clf=3f2a9c1b0d", "run-3c31j5szwv/default/f", "prod/search/f", "prod/search")]
    ['clf', '(temporary functions)', 'prod/search/f', 'prod/search']
    >>> charged_to("dev-ada/default/f", {"dev-ada/default/f"}), charged_to("dev-ada/default/f")
    ('dev-ada/default/f', '(temporary functions)')
    """
    function = function_of(name)
    has_ended = is_of_run(name) or (is_in_development(name) and function not in existing)
    return TEMPORARY if has_ended else function


def existing_names(client: Client, names: Iterable[str]) -> frozenset[str]:
    """Return the functions that exist, and their apps, if one of `names` may have been served by `gpufn serve`."""
    if not any(map(is_in_development, names)):
        return frozenset()
    parts = [parts_of(view.name) for view in client.functions()]
    return frozenset(text for env, app, base in parts for text in (f"{env}/{app}", f"{env}/{app}/{base}"))
