"""How a remote call's end becomes a value, or an exception that shows where it was raised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gpufn_core.encoding.raised_types import as_own_type
from gpufn_core.errors import FunctionRaised

if TYPE_CHECKING:
    from gpufn_core.encoding.record_classes import RecordClasses


class ResultReader:
    """Reads results. Instances are made of the classes that the `hint` of the result names, and of no others.

    With `trusts` instances are made of every class that is loaded here, and pickles are read, which run code.
    """

    def __init__(self, hint: Callable[[], Any] = lambda: Any, *, trusts: bool = False) -> None:
        self._hint = hint
        self._classes: RecordClasses | None = None
        self.trusts = trusts

    def trusting(self, *, trusts: bool = True) -> ResultReader:
        """The same, of a function that is trusted, or is not."""
        return self if trusts is self.trusts else ResultReader(self._hint, trusts=trusts)

    def decode(self, answer: tuple[str, bytes]) -> Any:
        from gpufn_core.encoding import native, values  # noqa: PLC0415

        find = native.loaded_class if self.trusts else self._find
        return values.decode_value(*answer, allow_pickle=self.trusts, find=find)

    def _find(self, module: str, qualname: str) -> type | None:
        if self._classes is None:
            from gpufn_core.encoding.record_classes import RecordClasses  # noqa: PLC0415

            self._classes = RecordClasses(lambda: [self._hint()])
        return self._classes.find(module, qualname)


PLAIN = ResultReader()


@contextlib.contextmanager
def remote_traceback() -> Iterator[None]:
    """An exception of the user's code is of its own type, and shows where it was raised, below our own stack."""
    try:
        yield
    except FunctionRaised as error:
        if error.traceback and not getattr(error, "__notes__", None):
            error.add_note(f"\nIn the worker:\n{error.traceback.rstrip()}")
        own = as_own_type(error)
        if own is error:
            raise
        raise own.with_traceback(error.__traceback__) from error.__cause__
