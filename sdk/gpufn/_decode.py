"""How a remote call's end becomes a value, or an exception that shows where it was raised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gpufn.errors import FunctionRaised


def decode(answer: tuple[str, bytes]) -> Any:
    from gpufn import values  # noqa: PLC0415

    return values.decode_value(*answer, allow_pickle=True)


@contextlib.contextmanager
def remote_traceback() -> Iterator[None]:
    """An exception of the user's code shows where it was raised, below our own stack."""
    try:
        yield
    except FunctionRaised as error:
        if error.traceback and not getattr(error, "__notes__", None):
            error.add_note(f"\nIn the worker:\n{error.traceback.rstrip()}")
        raise
