"""The name that `gpufn usage` and `gpufn cost` charge a record to. Pure."""

from __future__ import annotations

from typing import Final

from gpufn_core.spec.naming.temporary_names import is_of_run
from gpufn_core.spec.naming.variant_names import function_of

TEMPORARY: Final = "(temporary functions)"


def charged_to(name: str) -> str:
    """Return the function of a variant or a terminal, and one name for all functions of `gpufn run`. Other names, and
    ENV/APP of an app, stay.

    >>> [charged_to(name) for name in ("clf=3f2a9c1b0d", "run-3c31j5szwv/default/f", "prod/search/f", "prod/search")]
    ['clf', '(temporary functions)', 'prod/search/f', 'prod/search']
    """
    return TEMPORARY if is_of_run(name) else function_of(name)
