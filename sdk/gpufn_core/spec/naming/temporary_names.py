"""Names of the functions of `gpufn run`: each run has an environment of its own. Pure."""

from __future__ import annotations

import re
from typing import Final

_ENVIRONMENT: Final = re.compile(r"run-[0-9a-z]{10}")


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
