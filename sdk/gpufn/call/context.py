"""`gpufn.current()`: the Context of the call that a function runs for.

A worker installs a function that returns the Context of the running call. Elsewhere a function runs as plain Python,
and its Context discards progress and checkpoints.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from gpufn_core.protocol.limits import CHECKPOINT_BYTES

_PROGRESS_INTERVAL_S = 0.1


class Channel(Protocol):
    """The connection of a Context to the platform."""

    def progress(self, fraction: float, message: str) -> None: ...

    def save_checkpoint(self, content_type: str, body: bytes) -> None:
        """Store a checkpoint. Returns when it is stored."""
        ...

    def load_checkpoint(self) -> tuple[str, bytes] | None:
        """Return the last checkpoint of this call, from any attempt."""
        ...


class Context:
    """The running call: its id, attempt and deadline, its progress, and its checkpoints.

    >>> import gpufn
    >>> def train(steps: int) -> int:
    ...     ctx = gpufn.current()
    ...     first, total = ctx.restored or (0, 0)  # the checkpoint of an earlier attempt
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
        trace_state: str | None = None,
        may_pickle: bool = False,
    ) -> None:
        self.invocation = invocation
        self.attempt = attempt
        self.deadline = deadline
        self.trace = trace  # W3C traceparent: of the caller, or of this attempt if the platform traces it
        self.trace_state = trace_state  # W3C tracestate of the caller
        self._channel = channel
        self._may_pickle = may_pickle  # the function's option `pickle`
        self._latest = (0.0, "")
        self._sent_at = -_PROGRESS_INTERVAL_S
        self._is_scheduled = False  # a Timer will send the latest report
        self._lock = threading.Lock()
        self._restored: tuple[Any] | None = None

    def progress(self, fraction: float, message: str = "") -> None:
        """Report progress: `fraction` is from 0 to 1.

        Calls are cheap: at most ten reports per second are sent, and the latest is always sent. Raises InvalidInput if
        `fraction` is not a number.
        """
        from gpufn_core.errors import InvalidInput  # noqa: PLC0415

        try:
            fraction = float(fraction)
        except (TypeError, ValueError):
            raise InvalidInput(
                f"progress takes a fraction from 0 to 1 and a text, as in ctx.progress(0.4, 'text'), not {fraction!r}",
                field="progress",
            ) from None
        with self._lock:
            self._latest = fraction, str(message)
            if self._is_scheduled:
                return
            wait_s = self._sent_at + _PROGRESS_INTERVAL_S - time.monotonic()
            if wait_s <= 0 or fraction >= 1:
                self._send()
                return
            self._is_scheduled = True
        timer = threading.Timer(wait_s, self._send_scheduled)
        timer.daemon = True
        timer.start()

    def _send_scheduled(self) -> None:
        with self._lock:
            self._is_scheduled = False
            self._send()

    def _send(self) -> None:
        self._sent_at = time.monotonic()
        self._channel.progress(*self._latest)

    def checkpoint(self, state: Any) -> None:
        """Store `state` for the next attempt of this call. It replaces the last checkpoint. Returns when it is stored.

        `state` may be any value that a result may be, up to 4 MiB. Write larger state to a file, and checkpoint the
        file's name. There is a next attempt if the function has `retries`, or if the runner died. Raises InvalidInput
        and PayloadTooLarge.
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
                f"the checkpoint has {len(encoded[1]):,} bytes, and at most {CHECKPOINT_BYTES:,} are allowed: "
                "write the state to a file that the next attempt can read, and checkpoint its name"
            )
        self._channel.save_checkpoint(*encoded)

    @property
    def restored(self) -> Any:
        """The last checkpoint of an earlier attempt of this call, or None."""
        if self._restored is None:
            from gpufn_core.encoding import native, values  # noqa: PLC0415

            stored = self._channel.load_checkpoint()
            # The function made the checkpoint itself, so instances may be of any loaded class.
            find, may_pickle = native.loaded_class, self._may_pickle
            restored = None if stored is None else values.decode_value(*stored, allow_pickle=may_pickle, find=find)
            self._restored = (restored,)
        return self._restored[0]

    def __repr__(self) -> str:
        return f"<Context of {self.invocation or 'a local call'}, attempt {self.attempt}>"


class _LocalChannel:
    """The Channel of a function that runs as plain Python. Discards everything."""

    def progress(self, fraction: float, message: str) -> None: ...

    def save_checkpoint(self, content_type: str, body: bytes) -> None: ...

    def load_checkpoint(self) -> tuple[str, bytes] | None:
        return None


_ANY_SIZE = 1 << 62
_find: Callable[[], Context] | None = None
_local_attempt: ContextVar[int] = ContextVar("_attempt_here", default=1)


def install(find_context: Callable[[], Context] | None) -> None:
    """Use `find_context` to find the Context of the running call, as a worker does."""
    global _find  # noqa: PLW0603  one per process, by contract
    _find = find_context


@contextlib.contextmanager
def local_attempt(number: int) -> Iterator[None]:
    """Run the code of the `with` block as attempt `number` of a local call."""
    token = _local_attempt.set(number)
    try:
        yield
    finally:
        _local_attempt.reset(token)


def is_in_worker() -> bool:
    """Return whether this process is a worker, or was forked from one."""
    return _find is not None


def current() -> Context:
    """Return the Context of the running call.

    A function that runs locally, as plain Python, has one too: no id, no deadline, and attempt 1, or the number of the
    attempt under `run_locally`. Raises InvalidInput in a worker outside of a single call (in a hook, or in a batch of
    several calls).

    >>> current()
    <Context of a local call, attempt 1>
    """
    return Context("", _local_attempt.get(), None, _LocalChannel(), may_pickle=True) if _find is None else _find()
