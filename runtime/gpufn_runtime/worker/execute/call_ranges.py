"""Named ranges around calls, while a profiler wants them. Otherwise a call pays for one comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from gpufn_runtime.worker.context import current_attempt

Opener = Callable[[str], AbstractContextManager[object]]

opener: Opener | None = None


@contextlib.contextmanager
def opened(open_range: Opener) -> Iterator[None]:
    """Give each call that begins meanwhile a range."""
    global opener  # noqa: PLW0603  each call reads it
    opener = open_range
    try:
        yield
    finally:
        opener = None


def within(open_range: Opener, call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function in a range: with the id of its call, or of none for a batch or a hook. A range that fails is
    omitted: the profiler must not fail the call."""
    attempt = current_attempt.get()
    name = "batch or hook" if attempt is None else f"call {attempt.run.invocation}"
    opened_range = contextlib.ExitStack()
    with contextlib.suppress(Exception):
        opened_range.enter_context(open_range(name))
    try:
        return call(*args, **kwargs)
    finally:
        with contextlib.suppress(Exception):
            opened_range.close()
