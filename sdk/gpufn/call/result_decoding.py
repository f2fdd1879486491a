"""Decoding of the results of remote calls, and exceptions that show where the worker raised them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gpufn_core.encoding.raised_types import as_local_type
from gpufn_core.errors import FunctionRaised

if TYPE_CHECKING:
    from gpufn_core.encoding.record_classes import RecordClasses


class ResultReader:
    """Decodes results. It makes instances only of the classes that the `hint` of the result names.

    With `trusts`, it makes instances of every loaded class, and reads pickles, which run code.
    """

    def __init__(self, hint: Callable[[], Any] = lambda: Any, *, trusts: bool = False) -> None:
        self._hint = hint
        self._classes: RecordClasses | None = None
        self.trusts = trusts

    def with_trust(self, *, trusts: bool = True) -> ResultReader:
        """Return a reader with the same hint and this trust."""
        return self if trusts is self.trusts else ResultReader(self._hint, trusts=trusts)

    def decode(self, result: tuple[str, bytes]) -> Any:
        """Decode a content type and a body."""
        from gpufn_core.encoding import native, values  # noqa: PLC0415

        find = native.loaded_class if self.trusts else self._find
        return values.decode_value(*result, allow_pickle=self.trusts, find=find)

    def _find(self, module: str, qualname: str) -> type | None:
        if self._classes is None:
            from gpufn_core.encoding.record_classes import RecordClasses  # noqa: PLC0415

            self._classes = RecordClasses(lambda: [self._hint()])
        return self._classes.find(module, qualname)


PLAIN = ResultReader()


@contextlib.contextmanager
def remote_traceback() -> Iterator[None]:
    """Raise an exception of the user's code as its own type, with the worker's traceback as a note."""
    try:
        yield
    except FunctionRaised as error:
        if error.traceback and not getattr(error, "__notes__", None):
            error.add_note(f"\nIn the worker:\n{error.traceback.rstrip()}")
        typed = as_local_type(error)
        if typed is error:
            raise
        raise typed.with_traceback(error.__traceback__) from error.__cause__
