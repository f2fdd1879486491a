"""Names of the functions of `gpufn run`, and of `gpufn serve`: each run and each user has an environment. Pure."""

from __future__ import annotations

import re
from typing import Final

_ENVIRONMENT: Final = re.compile(r"run-[0-9a-z]{10}")
_DEVELOPMENT: Final = "dev-"


def run_environment(ulid: str) -> str:
    """Return the environment of one run.

    >>> run_environment("01KB5V4M1YQ3C31J5SZWVA7D2F")
    'run-5szwva7d2f'
    """
    return f"run-{ulid[-10:].lower()}"


def is_of_run(full: str) -> bool:
    """Return whether a full name, or ENV/APP, is in the environment of a run.

    >>> is_of_run("run-3c31j5szwv/default/f"), is_of_run("run-3c31j5szwv/default"), is_of_run("run-fast/default/f")
    (True, True, False)
    """
    return _ENVIRONMENT.fullmatch(full.partition("/")[0]) is not None and "/" in full


def development_environment(user: str) -> str:
    """Return the environment that `gpufn serve` uses for a user.

    >>> development_environment("Ada.Lovelace"), development_environment("")
    ('dev-ada-lovelace', 'dev-me')
    """
    name = re.sub(r"[^a-z0-9]+", "-", user.lower()).strip("-")[:30].strip("-")
    return f"{_DEVELOPMENT}{name or 'me'}"


def is_in_development(full: str) -> bool:
    """Return whether a full name, or ENV/APP, is in the environment of a user.

    >>> is_in_development("dev-ada/default/f"), is_in_development("dev-ada"), is_in_development("prod/search/f")
    (True, False, False)
    """
    return full.startswith(_DEVELOPMENT) and "/" in full
