"""Waits for what comes by itself: for milliseconds as a rule, and for 30 s before a test fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

WITHIN_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.05


def until(condition: Callable[[], Any], what: str = "so", *, within_s: float = WITHIN_S) -> Any:
    """What `condition` gives once that is true."""
    give_up = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < give_up, f"not {what} in {within_s:g} s"
        time.sleep(_LOOK_EVERY_S)
    return found
