"""The remote side of a callable: its arguments are encoded (`gpufn_core.encoding.values`), the current Transport carries them, and
the answer is decoded.

    Remote        f.remote(x)  f.spawn(x)  f.map(xs)  f.stream(x)
    AsyncRemote   await f.aio.remote(x)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, ParamSpec, TypeVar, cast, overload

from gpufn.call import transport
from gpufn.call.cancellable_wait import Wait
from gpufn.call.result_decoding import PLAIN, ResultReader, remote_traceback
from gpufn.call.submitted_call import Call
from gpufn.call.threads import in_thread
from gpufn.call.transport_protocol import MapTarget
from gpufn.declare.argument_checks import check_iterables, check_positive_seconds, unpack_arguments
from gpufn.declare.did_you_mean import FUNCTION_HINTS, attribute_error
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.function_spec import CallKind
from gpufn_core.spec.priority import Priority, priority_of

if TYPE_CHECKING:
    from typing import Unpack

    from gpufn.maps.map import AsyncMap, Map
    from gpufn.maps.platform_map import MapKeywords

P = ParamSpec("P")
R = TypeVar("R")  # what a call here returns
V = TypeVar("V")  # what a remote call returns: of a generator a list of its items
T = TypeVar("T")  # an item

_END: Any = object()


def kind_of(function: Callable[..., Any]) -> CallKind:
    if inspect.isasyncgenfunction(function):
        return CallKind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(function):
        return CallKind.GENERATOR
    return CallKind.ASYNC if inspect.iscoroutinefunction(function) else CallKind.SYNC


class Remote(Generic[P, R, V]):
    """The remote side of one callable. A subclass says which: its function, method, kind and signature."""

    _function_name: str
    _method_name: str = ""
    _kind: CallKind | None  # None: not known here, so that any call may be made
    _by_name_only = False  # its models may stand between the parameters that callers give
    _timeout_s: float | None = None
    _priority: Priority | None = None
    _may_pickle = False  # the function's option `pickle`

    @property
    def reader(self) -> ResultReader:
        """How its results are read."""
        return PLAIN

    def _signature(self) -> inspect.Signature:
        raise NotImplementedError

    def options(
        self,
        *,
        timeout: float | None = None,
        priority: Literal["hi", "normal", "low"] | None = None,
        trust_results: bool | None = None,
    ) -> Remote[P, R, V]:
        """The same remote side, whose calls have options of their own: ``f.options(timeout=2).remote(x)``.

        A call that has not ended `timeout` seconds after it was made is ended: InvocationExpired when it had not
        started, or else InvocationTimedOut. `priority` is its class. What is not given is the function's, and a map's
        items have the function's time always. With `trust_results` pickled results are read, which runs code that the
        function chose, and results may be of every class that is loaded here. Raises InvalidInput.
        """
        check_positive_seconds("timeout", timeout)
        return _WithOptions(
            self,
            self._timeout_s if timeout is None else float(timeout),
            self._priority if priority is None else priority_of(priority),
            trusts=self.reader.trusts if trust_results is None else trust_results,
        )

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> V:
        """Run on the platform and wait for the result; a generator's items come as a list."""
        if self._kind is not None and self._kind.streams:
            return cast("V", list(self.stream(*args, **kwargs)))
        content_type, body = self._encode(args, kwargs)
        with remote_traceback():
            answer = transport.current().call(
                self._function_name, self._method_name, content_type, body,
                timeout_s=self._timeout_s, priority=self._priority,
            )  # fmt: skip
            return cast("V", self.reader.decode(answer))

    def spawn(self, *args: P.args, **kwargs: P.kwargs) -> Call[V]:
        """Submit and return at once; the Call knows when it ended, and how."""
        content_type, body = self._encode(args, kwargs)
        invocation = transport.current().submit(
            self._function_name, self._method_name, content_type, body,
            timeout_s=self._timeout_s, priority=self._priority,
        )  # fmt: skip
        return Call(invocation, self.reader)

    @overload
    def stream(self: Remote[P, R, list[T]], *args: P.args, **kwargs: P.kwargs) -> Iterator[T]: ...
    @overload  # of a generator whose type does not say so, as Iterable[int]
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Any]: ...
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Any]:
        """The items of a generator, as it yields them. Closing the iterator cancels the call."""
        if self._kind is not None and not self._kind.streams:
            raise InvalidInput(f"{self!r} is no generator: use .remote(...)")
        return self._items(*self._encode(args, kwargs))

    def map(self, *iterables: Iterable[Any], **options: Unpack[MapKeywords]) -> Map[V]:
        """One call per item: their results in the order of the arguments, or with `ordered=False` as they come.

        An item's failure is raised when its turn comes, or with `return_exceptions=True` takes its result's place. At
        most `window` items (10,000) are ahead of what was read, so the arguments may be endless. `progress=True` shows
        a bar. With the `id` of a map it goes on behind the items that were accepted of it, and gives results `after`
        its cursor.
        """
        from gpufn.maps import map as _map  # noqa: PLC0415

        self.check_map(iterables)
        return _map.begin(self, self.remote, zip(*iterables, strict=False), _length(iterables), options)

    def starmap(self, arguments: Iterable[Iterable[Any]], **options: Unpack[MapKeywords]) -> Map[V]:
        """As `map`, with a tuple of arguments per call."""
        from gpufn.maps import map as _map  # noqa: PLC0415

        check_iterables("starmap", (arguments,))
        self.check_no_timeout()
        return _map.begin(self, self.remote, arguments, _length((arguments,)), options)

    def check_map(self, iterables: tuple[Any, ...]) -> None:
        """Raises TypeError for none, of which there would be no calls and no word, and for what is no iterable."""
        if not iterables:
            name = ".".join(filter(None, (self._function_name, self._method_name)))
            raise TypeError(f"map takes an iterable for each argument of {name}, as in .map(range(10))")
        check_iterables("map", iterables)
        self.check_no_timeout()

    def check_no_timeout(self) -> None:
        """Raises InvalidInput for a map with one: of what is its start, when it takes items as they come?"""
        if self._timeout_s is not None:
            raise InvalidInput("a timeout is one call's: the items of a map have the function's own", field="timeout")

    def target(self) -> MapTarget:
        """What its maps call."""
        return MapTarget(self._function_name, self._method_name, self._priority)

    def encoded(self, arguments: Iterable[Any]) -> bytes:
        """One item of a map."""
        return self._encode(unpack_arguments(arguments), {})[1]

    @property
    def aio(self) -> AsyncRemote[P, R, V]:
        """The same methods, to await."""
        return AsyncRemote(self)

    if not TYPE_CHECKING:  # a checker shall go on refusing what is not there

        def __getattr__(self, name: str) -> NoReturn:
            raise attribute_error(self, name, FUNCTION_HINTS)

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.Signature:
        """Raises TypeError for a wrong call, as plain Python does."""
        signature = self._signature()
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name = f"{self._function_name}.{self._method_name}".rstrip(".")
            raise TypeError(f"{name}: {error}; it takes {described(signature)}") from None
        return signature

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, bytes]:
        from gpufn_core.encoding import values  # noqa: PLC0415

        signature = self.check_call(args, kwargs)
        if self._by_name_only:
            args, kwargs = (), by_name(signature, args, kwargs)
        body = values.encode_call(args, kwargs, may_pickle=self._may_pickle)
        return values.call_type(body), body

    def _items(self, content_type: str, body: bytes) -> Iterator[Any]:
        with remote_traceback(), contextlib.ExitStack() as stack:
            items = transport.current().stream(
                self._function_name, self._method_name, content_type, body,
                timeout_s=self._timeout_s, priority=self._priority,
            )  # fmt: skip
            if callable(close := getattr(items, "close", None)):
                stack.callback(close)
            reader = self.reader
            for item in items:
                yield reader.decode(item)


class _WithOptions(Remote[P, R, V]):
    """The remote side of a callable, for calls with options of their own."""

    def __init__(
        self, remote: Remote[P, R, V], timeout_s: float | None, priority: Priority | None, *, trusts: bool
    ) -> None:
        self._remote = remote
        self._method_name = remote._method_name
        self._kind = remote._kind
        self._by_name_only = remote._by_name_only
        self._timeout_s = timeout_s
        self._priority = priority
        self._may_pickle = remote._may_pickle
        self._reader = remote.reader.trusting(trusts=trusts)
        given = {"timeout": timeout_s, "priority": priority and priority.value, "trust_results": trusts or None}
        options = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        self._text = f"{remote!r}.options({options})"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput(f"{self!r} is no call: use .remote(...)")

    @property
    def _function_name(self) -> str:  # type: ignore[override]
        return self._remote._function_name

    @property
    def reader(self) -> ResultReader:
        return self._reader

    def _signature(self) -> inspect.Signature:
        return self._remote._signature()

    def __repr__(self) -> str:
        return self._text


class AsyncRemote(Generic[P, R, V]):
    """`remote`, `spawn`, `map`, `starmap` and `stream` for asyncio.

    Each call waits in a thread of its own. When the task is cancelled, as a timeout does, `remote` and `stream` cancel
    their call; what was spawned, and a map's items, go on.
    """

    def __init__(self, remote: Remote[P, R, V]) -> None:
        self._remote = remote

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = getattr(self._remote, "__name__", "f")
        raise InvalidInput(f"{name}.aio is no call: use {name}.aio.remote(...)")

    async def remote(self, *args: P.args, **kwargs: P.kwargs) -> V:
        return await _leavable(functools.partial(self._remote.remote, *args, **kwargs))

    async def spawn(self, *args: P.args, **kwargs: P.kwargs) -> Call[V]:
        return await in_thread(functools.partial(self._remote.spawn, *args, **kwargs))

    @overload
    def stream(self: AsyncRemote[P, R, list[T]], *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]: ...
    @overload
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Any]: ...
    async def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Any]:
        items = _Items(self._remote.stream(*args, **kwargs))
        try:
            while (item := await _leavable(items.next)) is not _END:
                yield item
        finally:
            await in_thread(items.close)

    def map(self, *iterables: Iterable[Any], **options: Unpack[MapKeywords]) -> AsyncMap[V]:
        from gpufn.maps import map as _map  # noqa: PLC0415

        self._remote.check_map(iterables)
        return _map.begin_async(self._remote, self.remote, zip(*iterables, strict=False), _length(iterables), options)

    def starmap(
        self, arguments: Iterable[Iterable[Any]] | AsyncIterable[Iterable[Any]], **options: Unpack[MapKeywords]
    ) -> AsyncMap[V]:
        from gpufn.maps import map as _map  # noqa: PLC0415

        check_iterables("starmap", (arguments,), allow_async=True)
        self._remote.check_no_timeout()
        return _map.begin_async(self._remote, self.remote, arguments, _length((arguments,)), options)


async def _leavable(function: Callable[[], R]) -> R:
    """In a thread, and who does not wait for it any more leaves it."""
    wait = Wait()
    try:
        return await in_thread(wait.run, function)
    except BaseException:  # asyncio.CancelledError, without asyncio; one that failed waits for nothing
        wait.leave()
        raise


class _Items:
    """A stream that threads read. A reader that is cancelled leaves one waiting in it, and that one closes it then: a
    generator cannot be closed while it runs."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._is_running = False
        self._is_closed = False

    def next(self) -> Any:
        """_END behind the last one."""
        with self._lock:
            if self._is_closed:
                return _END
            self._is_running = True
        try:
            return next(self._items, _END)
        finally:
            with self._lock:
                self._is_running = False
                is_left = self._is_closed
            if is_left:
                self._close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._is_running:
                return
        self._close()

    def _close(self) -> None:
        if callable(close := getattr(self._items, "close", None)):
            close()


def described(signature: inspect.Signature) -> str:
    """
    >>> described(inspect.signature(lambda text, times=1: None))
    'text, times=1'
    """
    names = [str(p.replace(annotation=p.empty)) for p in signature.parameters.values()]
    return ", ".join(names) or "nothing"


def by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    named = dict(signature.bind(*args, **kwargs).arguments)
    others = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    for name in others:
        named |= named.pop(name, {})
    return named


def _length(iterables: Collection[Any]) -> int | None:
    """Of the shortest; None when one does not say."""
    lengths = [len(each) for each in iterables if isinstance(each, Sized)]
    return min(lengths) if lengths and len(lengths) == len(iterables) else None
