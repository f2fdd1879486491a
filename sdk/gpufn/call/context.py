"""`gpufn.current()`: what a function can know of the call that it runs, and say about it.

A worker installs where to find the Context of the running call; elsewhere a function runs as plain Python, and its
Context takes everything and keeps nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from gpufn_core.protocol.limits import CHECKPOINT_BYTES

_PROGRESS_APART_S = 0.1


class Channel(Protocol):
    """Carries what a Context says to the platform."""

    def progress(self, fraction: float, message: str) -> None: ...

    def keep(self, content_type: str, body: bytes) -> None:
        """Returns when it is stored."""
        ...

    def kept(self) -> tuple[str, bytes] | None:
        """What was kept last, by whichever attempt of this call."""
        ...


class Context:
    """The call that runs: its id, its attempt, its end; how far it is, and where it goes on after a crash.

    >>> import gpufn
    >>> def train(steps: int) -> int:
    ...     ctx = gpufn.current()
    ...     first, total = ctx.restored or (0, 0)  # an earlier attempt came so far
    ...     for step in range(first, steps):
    ...         total += step
    ...         ctx.checkpoint((step + 1, total))
    ...         ctx.progress((step + 1) / steps, f"step {step + 1}")
    ...     return total
    >>> train(4)
    6
    """

    def __init__(
        self,
        invocation: str,
        attempt: int,
        deadline: float | None,
        channel: Channel,
        *,
        trace: str | None = None,
        may_pickle: bool = False,
    ) -> None:
        self.invocation = invocation
        self.attempt = attempt
        self.deadline = deadline
        self.trace = trace  # the W3C traceparent that its caller sent; calls that it makes are of the same trace
        self._channel = channel
        self._may_pickle = may_pickle  # the function's option `pickle`
        self._latest = (0.0, "")
        self._told_at = -_PROGRESS_APART_S
        self._is_late = False  # a Timer tells the latest
        self._lock = threading.Lock()
        self._restored: tuple[Any] | None = None

    def progress(self, fraction: float, message: str = "") -> None:
        """Say how far it is: `fraction` from 0 to 1. Costs little: ten a second are told, and always the latest.

        Raises InvalidInput when it is no number.
        """
        from gpufn_core.errors import InvalidInput  # noqa: PLC0415

        try:
            fraction = float(fraction)
        except (TypeError, ValueError):
            raise InvalidInput(
                f"progress is a fraction from 0 to 1, then a text, as in ctx.progress(0.4, 'text'), not {fraction!r}",
                field="progress",
            ) from None
        with self._lock:
            self._latest = fraction, str(message)
            if self._is_late:
                return
            wait_s = self._told_at + _PROGRESS_APART_S - time.monotonic()
            if wait_s <= 0 or fraction >= 1:
                self._tell()
                return
            self._is_late = True
        timer = threading.Timer(wait_s, self._tell_late)
        timer.daemon = True
        timer.start()

    def _tell_late(self) -> None:
        with self._lock:
            self._is_late = False
            self._tell()

    def _tell(self) -> None:
        self._told_at = time.monotonic()
        self._channel.progress(*self._latest)

    def checkpoint(self, state: Any) -> None:
        """Keep `state` for the next attempt of this call; returns when it is stored, in place of the one before.

        What a result may be, up to 4 MiB: larger state belongs into a file, and its name into the checkpoint. There is
        a next attempt when the function has `retries`, or when the runner died. Raises InvalidInput, PayloadTooLarge.
        """
        from gpufn_core.encoding import media, values  # noqa: PLC0415
        from gpufn_core.errors import InvalidInput, PayloadTooLarge, ResultNotEncodable  # noqa: PLC0415

        try:
            encoded = values.encode_result(
                state, media.NATIVE, limit_bytes=_ANY_SIZE, what="checkpoint", may_pickle=self._may_pickle
            )
        except ResultNotEncodable as error:
            raise InvalidInput(error.message, field="checkpoint") from error
        if len(encoded[1]) > CHECKPOINT_BYTES:
            raise PayloadTooLarge(
                f"the checkpoint takes {len(encoded[1]):,} bytes, and {CHECKPOINT_BYTES:,} are allowed: "
                "write the state to a file that the next attempt can read, and checkpoint its name"
            )
        self._channel.keep(*encoded)

    @property
    def restored(self) -> Any:
        """The last checkpoint that an earlier attempt of this call made; None when there is none."""
        if self._restored is None:
            from gpufn_core.encoding import native, values  # noqa: PLC0415

            kept = self._channel.kept()
            # The function made it itself, so instances may be of all classes that it has loaded.
            find, may_pickle = native.loaded_class, self._may_pickle
            restored = None if kept is None else values.decode_value(*kept, allow_pickle=may_pickle, find=find)
            self._restored = (restored,)
        return self._restored[0]

    def __repr__(self) -> str:
        return f"<Context of {self.invocation or 'a call here'}, attempt {self.attempt}>"


class _Nowhere:
    """The Channel of a function that runs here."""

    def progress(self, fraction: float, message: str) -> None: ...

    def keep(self, content_type: str, body: bytes) -> None: ...

    def kept(self) -> tuple[str, bytes] | None:
        return None


_ANY_SIZE = 1 << 62
_find: Callable[[], Context] | None = None
_attempt_here: ContextVar[int] = ContextVar("_attempt_here", default=1)


def install(find: Callable[[], Context] | None) -> None:
    """In a worker: `find` gives the Context of the call that asks."""
    global _find  # noqa: PLW0603  one per process, by contract
    _find = find


@contextlib.contextmanager
def attempt_here(number: int) -> Iterator[None]:
    """Inside the `with`, code runs here as attempt `number` of its call."""
    token = _attempt_here.set(number)
    try:
        yield
    finally:
        _attempt_here.reset(token)


def is_in_worker() -> bool:
    """Whether this process is a worker, or was forked from one."""
    return _find is not None


def current() -> Context:
    """The Context of the call that this code runs for.

    In a function that runs here, as plain Python, there is one too: attempt 1, no id, no deadline. `run_locally` counts
    the attempts that a function's `retries` allow. In a worker but
    outside of a call (a hook, a batch of several calls) InvalidInput is raised.

    >>> current()
    <Context of a call here, attempt 1>
    """
    return Context("", _attempt_here.get(), None, _Nowhere(), may_pickle=True) if _find is None else _find()
