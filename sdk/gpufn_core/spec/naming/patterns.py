"""Patterns of function names, for the scopes of API keys and for the functions of a team. Pure.

*                     every function
prod/*                every app of the environment `prod`
prod/search/*         every function of one app
*/search/*            the app `search` in every environment
prod/search/predict   one function; `predict` is the one in default/default
"""

from __future__ import annotations

import re
from typing import Final

from gpufn_core.errors import InvalidInput
from gpufn_core.spec.naming.names import FULL_NAME, GROUP, parts_of
from gpufn_core.spec.naming.variant_names import function_of

ALL: Final = "*"
PATTERN: Final = re.compile(
    rf"\*|{GROUP.pattern}/\*|(?:\*|{GROUP.pattern})/(?:\*|{GROUP.pattern})/\*|{FULL_NAME.pattern}"
)


def is_pattern(text: str) -> bool:
    """Return whether `text` is a pattern: with asterisks for whole parts, or the full name of a function.

    >>> [is_pattern(text) for text in ("*", "prod/*", "prod/search/*", "predict", "pre*", "prod/search")]
    [True, True, True, True, False, False]
    """
    return PATTERN.fullmatch(text) is not None


def check_pattern(text: str, field: str) -> None:
    """Raise InvalidInput, with the name of the field, unless `text` is a pattern."""
    if not is_pattern(text):
        raise InvalidInput(
            f"{text[:130]!r} is not a pattern of functions: write prod/*, prod/search/*, */search/* or the full name "
            "of a function",
            field=field,
        )


def matches(pattern: str, function: str) -> bool:
    """Return whether `pattern` names the function with the full name `function`. A variant counts as its function.

    >>> matches("prod/*", "prod/search/predict"), matches("default/*", "predict"), matches("predict", "prod/a/predict")
    (True, True, False)
    """
    parts = parts_of(function_of(function))
    return all(part in (ALL, wanted) for part, wanted in zip(_parts(pattern), parts, strict=True))


def includes(outer: str, inner: str) -> bool:
    """Return whether `outer` matches every function that `inner` matches.

    >>> includes("prod/*", "prod/search/*"), includes("prod/search/*", "prod/*")
    (True, False)
    """
    return all(part in (ALL, wanted) for part, wanted in zip(_parts(outer), _parts(inner), strict=True))


def overlap(one: str, other: str) -> bool:
    """Return whether two patterns can match the same function.

    >>> overlap("prod/*", "*/search/*"), overlap("prod/ads/*", "*/search/*")
    (True, False)
    """
    return all(ALL in (a, b) or a == b for a, b in zip(_parts(one), _parts(other), strict=True))


def _parts(pattern: str) -> tuple[str, str, str]:
    """Return the three parts of a pattern."""
    if not pattern.endswith(ALL):
        return parts_of(pattern)
    groups = pattern.split("/")[:-1]
    env, app = (*groups, ALL, ALL)[:2]
    return env, app, ALL
