"""The remote calls of a function or a method.

    Remote        f.remote(x)  f.spawn(x)  f.map(xs)  f.stream(x)
    AsyncRemote   await f.aio.remote(x)

A call encodes its arguments (`gpufn_core.encoding.values`), sends them over the current Transport, and decodes the
result.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, ParamSpec, TypeVar, cast, overload

from gpufn.call import transport
from gpufn.call.cancellable_wait import CancelScope
from gpufn.call.result_decoding import PLAIN, ResultReader, remote_traceback
from gpufn.call.submitted_call import Call
from gpufn.call.threads import in_thread
from gpufn.call.transport_protocol import EncodedCall, Target
from gpufn.declare.hints.argument_checks import check_iterables, check_positive_seconds, unpack_arguments
from gpufn.declare.hints.did_you_mean import FUNCTION_HINTS, attribute_error
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.function_spec import CallKind
from gpufn_core.spec.naming.variant_names import with_values
from gpufn_core.spec.priority import Priority, priority_of

if TYPE_CHECKING:
    from typing import Unpack

    from gpufn.maps.map import AsyncMap, Map
    from gpufn.maps.platform_map import MapKeywords

P = ParamSpec("P")
R = TypeVar("R")  # the result of a local call
V = TypeVar("V")  # the result of a remote call; for a generator, the list of its items
T = TypeVar("T")  # an item

_END: Any = object()


def kind_of(function: Callable[..., Any]) -> CallKind:
    if inspect.isasyncgenfunction(function):
        return CallKind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(function):
        return CallKind.GENERATOR
    return CallKind.ASYNC if inspect.iscoroutinefunction(function) else CallKind.SYNC


class Remote(Generic[P, R, V]):
    """The remote calls of one callable. A subclass defines its function, method, kind and signature."""

    _function_name: str
    _method_name: str = ""
    _kind: CallKind | None  # None: unknown, so any kind of call is allowed
    _by_name_only = False  # send arguments by name, because models may stand between the callers' parameters
    _timeout_s: float | None = None
    _priority: Priority | None = None
    _may_pickle = False  # the function's option `pickle`

    @property
    def reader(self) -> ResultReader:
        """The decoder of the results."""
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
        """Return the same function with options for its calls: ``f.options(timeout=2).remote(x)``.

        A call that has not ended after `timeout` seconds is stopped, and raises InvocationExpired if it had not
        started, else InvocationTimedOut. The items of a map always have the function's own timeout. Without `priority`,
        calls have the function's priority. With `trust_results`, results may be pickles, which run code that the
        function chose, and instances of any class that is loaded in this process. Raises InvalidInput.
        """
        check_positive_seconds("timeout", timeout)
        return _WithOptions(
            self,
            self._timeout_s if timeout is None else float(timeout),
            self._priority if priority is None else priority_of(priority),
            trusts=self.reader.trusts if trust_results is None else trust_results,
        )

    def with_options(self, **options: Any) -> Remote[P, R, V]:
        """Return the same function with other options: ``f.with_options(gpu="L4", max_workers=2).remote(x)``.

        `timeout`, `priority` and `trust_results` come from `options`. The others are options of `@gpu_function` that a
        caller may change: `gpu`, `share`, `vram`, `sm`, `cpu`, `memory`, `max_workers`, `idle_timeout`, `concurrency`
        and `retries`. They make a variant: a separate pool of workers. A key needs the scope `deploy` for that. Raises
        InvalidInput.
        """
        of_calls = {name: options.pop(name) for name in ("timeout", "priority", "trust_results") if name in options}
        if not options:
            return self.options(**of_calls)
        from gpufn_core.spec.naming import variant_options  # noqa: PLC0415

        variant_options.check_names(options)
        pool = with_values(self._function_name, variant_options.marked(options))
        changed = ", ".join(f"{name}={value!r}" for name, value in options.items())
        variant = _Variant(self, pool, f"{self!r}.with_options({changed})")
        return variant.options(**of_calls) if of_calls else variant

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> V:
        """Run on the platform and wait for the result. The items of a generator come as a list."""
        if self._kind is not None and self._kind.streams:
            return cast("V", list(self.stream(*args, **kwargs)))
        call = self._call(args, kwargs)
        with remote_traceback():
            return cast("V", self.reader.decode(transport.current().call(call)))

    def spawn(self, *args: P.args, **kwargs: P.kwargs) -> Call[V]:
        """Submit a call and return at once. The Call has its status and its result."""
        return Call(transport.current().submit(self._call(args, kwargs)), self.reader)

    @overload
    def stream(self: Remote[P, R, list[T]], *args: P.args, **kwargs: P.kwargs) -> Iterator[T]: ...
    @overload  # a generator function whose return hint is another type, such as Iterable[int]
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Any]: ...
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Any]:
        """Yield the items of a generator as they are produced. Closing the iterator cancels the call."""
        if self._kind is not None and not self._kind.streams:
            raise InvalidInput(f"{self!r} is not a generator: use .remote(...)")
        return self._items(self._call(args, kwargs))

    def map(self, *iterables: Iterable[Any], **options: Unpack[MapKeywords]) -> Map[V]:
        """Make a call per item. Yield the results in the order of the items, or with `ordered=False` as they come.

        The failure of an item is raised at its turn, or with `return_exceptions=True` takes the place of its result. At
        most `window` items (10,000) are sent ahead of the results that were read, so the iterables may be endless.
        `progress=True`, the default in a notebook, shows a progress bar. The `id` of an earlier map continues it: items
        that it accepted are not sent again, and results start `after` a cursor.
        """
        from gpufn.maps import map as _map  # noqa: PLC0415

        self.check_map(iterables)
        return _map.begin(self, self.remote, zip(*iterables, strict=False), _length(iterables), options)

    def starmap(self, arguments: Iterable[Iterable[Any]], **options: Unpack[MapKeywords]) -> Map[V]:
        """Like `map`, with a tuple of arguments per call."""
        from gpufn.maps import map as _map  # noqa: PLC0415

        check_iterables("starmap", (arguments,))
        self.check_no_timeout()
        return _map.begin(self, self.remote, arguments, _length((arguments,)), options)

    def check_map(self, iterables: tuple[Any, ...]) -> None:
        """Raise TypeError unless `iterables` are iterable. A map without iterables would silently make no calls."""
        if not iterables:
            raise TypeError(f"map takes an iterable for each argument of {self.target().path}, as in .map(range(10))")
        check_iterables("map", iterables)
        self.check_no_timeout()

    def check_no_timeout(self) -> None:
        """Raise InvalidInput for a map with a timeout: its items are sent over time, so it has no single start."""
        if self._timeout_s is not None:
            raise InvalidInput(
                "timeout applies to a single call: the items of a map have the timeout of the function", field="timeout"
            )

    def target(self) -> Target:
        """Return the function, method and priority of its calls."""
        return Target(self._function_name, self._method_name, self._priority)

    def encode_item(self, arguments: Iterable[Any]) -> bytes:
        """Return the encoded arguments of one item of a map."""
        return self._encode(unpack_arguments(arguments), {})

    @property
    def aio(self) -> AsyncRemote[P, R, V]:
        """The same methods for asyncio."""
        return AsyncRemote(self)

    if not TYPE_CHECKING:  # so that type checkers still refuse unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise attribute_error(self, name, FUNCTION_HINTS)

    def check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.Signature:
        """Raise TypeError for arguments that do not fit the signature, as plain Python does."""
        signature = self._signature()
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.target().path}: {error}; it takes {describe_parameters(signature)}") from None
        return signature

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EncodedCall:
        from gpufn_core.encoding import values  # noqa: PLC0415

        body = self._encode(args, kwargs)
        return EncodedCall(self.target(), values.call_type(body), body, self._timeout_s)

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        from gpufn_core.encoding import values  # noqa: PLC0415

        signature = self.check_call(args, kwargs)
        if self._by_name_only:
            args, kwargs = (), by_name(signature, args, kwargs)
        return values.encode_call(args, kwargs, may_pickle=self._may_pickle)

    def _items(self, call: EncodedCall) -> Iterator[Any]:
        with remote_traceback(), contextlib.ExitStack() as stack:
            items = transport.current().stream(call)
            if callable(close := getattr(items, "close", None)):
                stack.callback(close)
            reader = self.reader
            for item in items:
                yield reader.decode(item)


class _WithOptions(Remote[P, R, V]):
    """A Remote whose calls have their own options."""

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
        self._reader = remote.reader.with_trust(trusts=trusts)
        options = {"timeout": timeout_s, "priority": priority and priority.value, "trust_results": trusts or None}
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        self._repr = f"{remote!r}.options({arguments})"

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput(f"{self!r} is not callable: use .remote(...)")

    @property
    def _function_name(self) -> str:  # type: ignore[override]
        return self._remote._function_name

    @property
    def reader(self) -> ResultReader:
        return self._reader

    def _signature(self) -> inspect.Signature:
        return self._remote._signature()

    def __repr__(self) -> str:
        return self._repr


class _Variant(_WithOptions[P, R, V]):
    """A Remote whose calls go to a variant, by the name of its pool."""

    def __init__(self, remote: Remote[P, R, V], pool: str, described: str) -> None:
        super().__init__(remote, remote._timeout_s, remote._priority, trusts=remote.reader.trusts)
        self._pool = pool
        self._repr = described

    @property
    def _function_name(self) -> str:  # type: ignore[override]
        return self._pool


class AsyncRemote(Generic[P, R, V]):
    """`remote`, `spawn`, `map`, `starmap` and `stream` for asyncio.

    Each call waits in its own thread. When the task is cancelled, for example by a timeout, `remote` and `stream`
    cancel their call. Spawned calls and the items of a map continue.
    """

    def __init__(self, remote: Remote[P, R, V]) -> None:
        self._remote = remote

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = getattr(self._remote, "__name__", "f")
        raise InvalidInput(f"{name}.aio is not callable: use {name}.aio.remote(...)")

    async def remote(self, *args: P.args, **kwargs: P.kwargs) -> V:
        return await _run_cancellable(functools.partial(self._remote.remote, *args, **kwargs))

    async def spawn(self, *args: P.args, **kwargs: P.kwargs) -> Call[V]:
        return await in_thread(functools.partial(self._remote.spawn, *args, **kwargs))

    @overload
    def stream(self: AsyncRemote[P, R, list[T]], *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]: ...
    @overload
    def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Any]: ...
    async def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Any]:
        items = _ThreadedItems(self._remote.stream(*args, **kwargs))
        try:
            while (item := await _run_cancellable(items.next)) is not _END:
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


async def _run_cancellable(function: Callable[[], R]) -> R:
    """Run `function` in a thread. When this task is cancelled, cancel the waits of `function`."""
    scope = CancelScope()
    try:
        return await in_thread(scope.run, function)
    except BaseException:  # CancelledError, without an import of asyncio; after other errors nothing waits
        scope.cancel()
        raise


class _ThreadedItems:
    """A stream that is read in threads.

    A generator cannot be closed while it runs. So when a reader is cancelled while a thread waits for an item, this
    thread closes the stream afterwards.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._is_running = False
        self._is_closed = False

    def next(self) -> Any:
        """Return the next item, or _END after the last one."""
        with self._lock:
            if self._is_closed:
                return _END
            self._is_running = True
        try:
            return next(self._items, _END)
        finally:
            with self._lock:
                self._is_running = False
                must_close = self._is_closed
            if must_close:
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


def describe_parameters(signature: inspect.Signature) -> str:
    """Return the parameters of a signature as text, without their types.

    >>> describe_parameters(inspect.signature(lambda text, times=1: None))
    'text, times=1'
    """
    names = [str(p.replace(annotation=p.empty)) for p in signature.parameters.values()]
    return ", ".join(names) or "nothing"


def by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by the names of their parameters."""
    named = dict(signature.bind(*args, **kwargs).arguments)
    for name in [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]:
        named |= named.pop(name, {})
    return named


def _length(iterables: Collection[Any]) -> int | None:
    """Return the length of the shortest iterable, or None if one of them has no length."""
    lengths = [len(iterable) for iterable in iterables if isinstance(iterable, Sized)]
    return min(lengths) if lengths and len(lengths) == len(iterables) else None
