"""What `@gpu_function` returns: the user's code, callable here as before, and its remote side.

    Function        a function             f(x)  f.remote(x)  f.spawn(x)  f.map(xs)  f.stream(x)  await f.aio.remote(x)
    FunctionClass   a class                C()   C.method.remote(x)
    Call            a submitted invocation

A remote call: the arguments are encoded (`gpufn.values`), the current Transport carries them, the answer is decoded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Iterator, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, ParamSpec, TypeVar, cast

from gpufn import _transport
from gpufn._decode import decode, remote_traceback
from gpufn._hooks import hooks
from gpufn._threads import in_thread, run_coroutine
from gpufn._transport import MapTarget
from gpufn.errors import InvalidInput, InvalidSpec
from gpufn.ids import is_invocation_id
from gpufn.image import ImageSpec
from gpufn.invocation import InvocationState
from gpufn.model import ModelSpec
from gpufn.priority import Priority, priority_of
from gpufn.spec import CallKind, EntryPoint, FunctionSpec, Packaging

if TYPE_CHECKING:
    from gpufn._map import AsyncMap, Map
    from gpufn._options import Settings

P = ParamSpec("P")
R = TypeVar("R")  # what a call here returns
V = TypeVar("V")  # what a remote call returns
T = TypeVar("T")


def kind_of(function: Callable[..., Any]) -> CallKind:
    if inspect.isasyncgenfunction(function):
        return CallKind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(function):
        return CallKind.GENERATOR
    return CallKind.ASYNC if inspect.iscoroutinefunction(function) else CallKind.SYNC


class Call(Generic[V]):
    """A submitted invocation: it goes on without us, and its result is kept for a while.

    >>> from gpufn import gpu_function
    >>> from gpufn.testing import run_locally
    >>> @gpu_function
    ... def slow(x: int) -> int:
    ...     return x * x
    >>> with run_locally():
    ...     call = slow.spawn(7)
    ...     again = Call.from_id(call.id)  # in another process, tomorrow
    ...     again.result(timeout=10), again.status().value, again.cancel()
    (49, 'succeeded', False)
    """

    def __init__(self, id: str) -> None:  # noqa: A002
        self.id = id

    @classmethod
    def from_id(cls, id: str) -> Call[Any]:  # noqa: A002
        """A call that was submitted elsewhere, or earlier."""
        if not is_invocation_id(id):
            raise InvalidInput(f"{id!r} is not an invocation's id, which has 26 letters and digits")
        return Call(id)

    def status(self) -> InvocationState:
        """Queued, running, or how it ended."""
        return _transport.current().status(self.id)

    def result(self, timeout: float | None = None) -> V:
        """Wait for its end. Raises TimeoutError when it still runs after `timeout` seconds."""
        with remote_traceback():
            return cast("V", decode(_transport.current().result(self.id, timeout_s=timeout)))

    def cancel(self) -> bool:
        """False when it had ended already."""
        return _transport.current().cancel(self.id)

    @property
    def aio(self) -> AsyncCall[V]:
        """The same methods, to await."""
        return AsyncCall(self)

    def __repr__(self) -> str:
        return f"Call({self.id!r})"


class AsyncCall(Generic[V]):
    """A Call's methods, to await."""

    def __init__(self, call: Call[V]) -> None:
        self._call = call

    async def status(self) -> InvocationState:
        return await in_thread(self._call.status)

    async def result(self, timeout: float | None = None) -> V:
        return await in_thread(self._call.result, timeout)

    async def cancel(self) -> bool:
        return await in_thread(self._call.cancel)


class Remote(Generic[P, R, V]):
    """The remote side of one callable. A subclass says which: its function, method, kind and signature."""

    _function_name: str
    _method_name: str = ""
    _kind: CallKind
    _by_name_only = False  # its models may stand between the parameters that callers give
    _priority: Priority | None = None

    def _signature(self) -> inspect.Signature:
        raise NotImplementedError

    def options(self, *, priority: Literal["hi", "normal", "low"]) -> Remote[P, R, V]:
        """The same remote side, whose calls are of this class: ``f.options(priority="hi").remote(x)``.

        Raises InvalidInput.
        """
        return _WithOptions(self, priority_of(priority))

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> V:
        """Run on the platform and wait for the result; a generator's items come as a list."""
        if self._kind.streams:
            return cast("V", list(self.stream(*args, **kwargs)))
        content_type, body = self._encode(args, kwargs)
        with remote_traceback():
            answer = _transport.current().call(
                self._function_name, self._method_name, content_type, body, priority=self._priority
            )
            return cast("V", decode(answer))

    def spawn(self, *args: P.args, **kwargs: P.kwargs) -> Call[V]:
        """Submit and return at once; the Call knows when it ended, and how."""
        call = self._encode(args, kwargs)
        return Call(_transport.current().submit(self._function_name, self._method_name, *call, priority=self._priority))

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Any]:
        """The items of a generator, as it yields them. Closing the iterator cancels the call."""
        if not self._kind.streams:
            raise InvalidInput(f"{self!r} is no generator: use .remote(...)")
        return self._items(*self._encode(args, kwargs))

    def map(
        self,
        *iterables: Iterable[Any],
        ordered: bool = True,
        return_exceptions: bool = False,
        window: int | None = None,
        progress: bool = False,
        id: str | None = None,  # noqa: A002
        after: str | None = None,
    ) -> Map[V]:
        """One call per item: their results in the order of the arguments, or `ordered=False` as they come.

        An item's failure is raised when its turn comes, or with `return_exceptions` takes its result's place. At most
        `window` items are ahead of what was read (10,000), so the arguments may be endless. With the `id` of a map it
        goes on behind the items that were accepted of it, and gives results `after` its cursor.
        """
        from gpufn import _map  # noqa: PLC0415

        options = _map.MapOptions(ordered, return_exceptions, window, progress, id, after)
        return _map.begin(self, self.remote, zip(*iterables, strict=False), _length(iterables), options)

    def starmap(
        self,
        arguments: Iterable[Iterable[Any]],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        window: int | None = None,
        progress: bool = False,
        id: str | None = None,  # noqa: A002
        after: str | None = None,
    ) -> Map[V]:
        """As `map`, with a tuple of arguments per call."""
        from gpufn import _map  # noqa: PLC0415

        options = _map.MapOptions(ordered, return_exceptions, window, progress, id, after)
        return _map.begin(self, self.remote, arguments, _length((arguments,)), options)

    def target(self) -> MapTarget:
        """What its maps call."""
        return MapTarget(self._function_name, self._method_name, self._priority)

    def encoded(self, arguments: Iterable[Any]) -> bytes:
        """One item of a map."""
        return self._encode(tuple(arguments), {})[1]

    @property
    def aio(self) -> AsyncRemote[P, R, V]:
        """The same methods, to await."""
        return AsyncRemote(self)

    def _encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, bytes]:
        from gpufn import values  # noqa: PLC0415

        signature = self._signature()
        signature.bind(*args, **kwargs)  # a wrong call fails here, as it does in plain Python
        if self._by_name_only:
            args, kwargs = (), _by_name(signature, args, kwargs)
        return values.NATIVE, values.encode_call(args, kwargs)

    def _items(self, content_type: str, body: bytes) -> Iterator[Any]:
        with remote_traceback(), contextlib.ExitStack() as stack:
            items = _transport.current().stream(
                self._function_name, self._method_name, content_type, body, priority=self._priority
            )
            if callable(close := getattr(items, "close", None)):
                stack.callback(close)
            for item in items:
                yield decode(item)


class _WithOptions(Remote[P, R, V]):
    """The remote side of a callable, for calls with options of their own."""

    def __init__(self, remote: Remote[P, R, V], priority: Priority) -> None:
        self._remote = remote
        self._method_name = remote._method_name
        self._kind = remote._kind
        self._by_name_only = remote._by_name_only
        self._priority = priority
        self._text = f"{remote!r}.options(priority={priority.value!r})"

    @property
    def _function_name(self) -> str:  # type: ignore[override]
        return self._remote._function_name

    def _signature(self) -> inspect.Signature:
        return self._remote._signature()

    def __repr__(self) -> str:
        return self._text


class AsyncRemote(Generic[P, R, V]):
    """`remote`, `spawn`, `map`, `starmap` and `stream` for asyncio.

    Each call waits in a thread of its own: cancelling the task stops the wait, not the call.
    """

    def __init__(self, remote: Remote[P, R, V]) -> None:
        self._remote = remote

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        name = getattr(self._remote, "__name__", "f")
        raise InvalidInput(f"{name}.aio is no call: use {name}.aio.remote(...)")

    async def remote(self, *args: P.args, **kwargs: P.kwargs) -> V:
        return await in_thread(functools.partial(self._remote.remote, *args, **kwargs))

    async def spawn(self, *args: P.args, **kwargs: P.kwargs) -> Call[V]:
        return await in_thread(functools.partial(self._remote.spawn, *args, **kwargs))

    async def stream(self, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[Any]:
        items = self._remote.stream(*args, **kwargs)
        try:
            while (item := await in_thread(next, items, _END)) is not _END:
                yield item
        finally:
            if callable(close := getattr(items, "close", None)):
                await in_thread(close)

    def map(
        self,
        *iterables: Iterable[Any],
        ordered: bool = True,
        return_exceptions: bool = False,
        window: int | None = None,
        progress: bool = False,
        id: str | None = None,  # noqa: A002
        after: str | None = None,
    ) -> AsyncMap[V]:
        from gpufn import _map  # noqa: PLC0415

        options = _map.MapOptions(ordered, return_exceptions, window, progress, id, after)
        return _map.begin_async(self._remote, self.remote, zip(*iterables, strict=False), _length(iterables), options)

    def starmap(
        self,
        arguments: Iterable[Iterable[Any]] | AsyncIterable[Iterable[Any]],
        *,
        ordered: bool = True,
        return_exceptions: bool = False,
        window: int | None = None,
        progress: bool = False,
        id: str | None = None,  # noqa: A002
        after: str | None = None,
    ) -> AsyncMap[V]:
        from gpufn import _map  # noqa: PLC0415

        options = _map.MapOptions(ordered, return_exceptions, window, progress, id, after)
        return _map.begin_async(self._remote, self.remote, arguments, _length((arguments,)), options)


# By name, then by where it was written: a notebook declares the same function many times, and the last one counts.
_declared_here: dict[str, dict[tuple[str, str], weakref.ref[_Declared]]] = {}


def declared_here(name: str) -> list[Function[..., Any, Any] | FunctionClass]:
    """The functions of this process that would be deployed as `name`."""
    found = (reference() for reference in _declared_here.get(name, {}).values())
    return [function for function in found if isinstance(function, (Function, FunctionClass))]


class _Declared:
    """What Function and FunctionClass share: the user's object, its settings, its spec, and how it is pickled."""

    raw: Any
    settings: Settings
    __name__: str
    __qualname__: str

    def __init__(self, raw: Any, settings: Settings) -> None:
        functools.update_wrapper(cast("Any", self), raw, updated=())
        self.raw = raw
        self.settings = settings
        _declared_here.setdefault(settings.name, {})[raw.__module__, raw.__qualname__] = weakref.ref(self)

    @property
    def name(self) -> str:
        """As deployed."""
        return self.settings.name

    def spec(
        self,
        packaging: Packaging = Packaging.SOURCE,
        modules: tuple[str, ...] = (),
        models: tuple[ModelSpec, ...] = (),
        image: ImageSpec | None = None,
    ) -> FunctionSpec:
        """What is deployed. Resolves the type hints; InvalidSpec says which parameter is wrong."""
        from gpufn import _schema  # noqa: PLC0415

        try:
            return self.settings.spec(
                _schema.methods_of(self.raw, self.settings.batch, self.settings.declared_models),
                is_class=isinstance(self.raw, type),
                entry=EntryPoint(self.raw.__module__, self.raw.__qualname__, packaging),
                python=f"{sys.version_info.major}.{sys.version_info.minor}",
                modules=modules,
                models=models,
                image=image,
            )
        except InvalidSpec as error:
            raise InvalidSpec(f"{self.__qualname__}: {error.message}") from error

    def sessions(self, given: Collection[str] = ()) -> dict[str, Any]:
        """Its models but those in `given`, to run here."""
        wanted = {name: model for name, model in self.settings.declared_models.items() if name not in given}
        if not wanted:
            return {}
        from gpufn._local_session import session_of  # noqa: PLC0415
        from gpufn._model_files import folder_of  # noqa: PLC0415

        return {name: session_of(model, folder_of(self.raw)) for name, model in wanted.items()}

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By reference where it can be imported, else by value; `raw` comes after the memo, for it may refer to us."""
        module = sys.modules.get(self.raw.__module__)
        if self.raw.__module__ != "__main__" and getattr(module, self.raw.__qualname__, None) is self:
            return self.raw.__qualname__  # type: ignore[no-any-return]
        return _blank, (type(self),), {"raw": self.raw, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.raw, self.settings = state["raw"], state["settings"]
        functools.update_wrapper(cast("Any", self), self.raw, updated=())


class Function(_Declared, Remote[P, R, V]):
    """A function that gpufn can run elsewhere. Made by `@gpu_function`.

    >>> from gpufn import gpu_function
    >>> from gpufn.testing import run_locally
    >>> @gpu_function
    ... def square(x: int) -> int:
    ...     return x * x
    >>> isinstance(square, Function), square.name, square(3)
    (True, 'square', 9)
    >>> with run_locally():
    ...     square.remote(4), list(square.map(range(5))), square.spawn(6).result()
    (16, [0, 1, 4, 9, 16], 36)
    """

    raw: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run here, as plain Python."""
        models = self.settings.declared_models
        if not models:
            return self.raw(*args, **kwargs)
        given = {name: kwargs.pop(name) for name in models if name in kwargs}  # stand-ins
        return cast("R", self.runnable(given)(**_by_name(self._signature(), args, kwargs)))

    def runnable(self, given: dict[str, Any] | None = None) -> Callable[..., Any]:
        """`raw`, with its models; those in `given` take the place of the declared ones."""
        if not self.settings.declared_models:
            return self.raw
        given = given or {}
        return functools.partial(self.raw, **given, **self.sessions(given))

    @property
    def _function_name(self) -> str:  # type: ignore[override]
        return self.settings.name

    @functools.cached_property
    def _kind(self) -> CallKind:  # type: ignore[override]
        return kind_of(self.raw)

    @property
    def _by_name_only(self) -> bool:  # type: ignore[override]
        return bool(self.settings.declared_models)

    def _signature(self) -> inspect.Signature:
        signature, models = _signature_of(self.raw), self.settings.declared_models
        if not models:
            return signature
        return signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in models])

    def __repr__(self) -> str:
        return f"<Function {self.settings.name}>"


class FunctionClass(_Declared):
    """A class that gpufn can run elsewhere: each worker holds one instance. Made by `@gpu_function`."""

    raw: type

    def __call__(self, *args: Any, **kwargs: Any) -> Instance:
        return Instance(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # Only what is not found otherwise gets here; `raw` is missing while we are being unpickled.
        if name == "raw" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        if name in hooks(self.raw, "method"):
            return Method(self, name)
        return getattr(self.raw, name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self.raw,)

    def __repr__(self) -> str:
        return f"<FunctionClass {self.settings.name}>"


class Instance:
    """An instance of a FunctionClass here. The user's own object is made, and entered, when it is first used."""

    def __init__(self, declared: FunctionClass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._declared = declared
        self._arguments = args, kwargs
        self._object: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name in hooks(self._declared.raw, "method"):
            return Method(self._declared, name, self)
        return getattr(self._local(), name)

    def __enter__(self) -> Instance:
        self._local()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Run the `@exit` methods."""
        entered, self._object = self._object, None
        if entered is not None:
            _run_hooks(entered, "exit")

    def _local(self) -> Any:
        if self._object is None:
            args, kwargs = self._arguments
            cls = self._declared.raw
            made = cls.__new__(cls, *args, **kwargs)
            for name, session in self._declared.sessions().items():
                setattr(made, name, session)  # there for its __init__ already
            made.__init__(*args, **kwargs)
            _run_hooks(made, "enter")
            self._object = made
        return self._object

    def __repr__(self) -> str:
        return f"<{self._declared.__qualname__} of {self._declared!r}>"


class Method(Remote[P, R, V]):
    """A `@method` of a FunctionClass."""

    def __init__(self, declared: FunctionClass, name: str, instance: Instance | None = None) -> None:
        self._declared = declared
        self._method_name = name
        self._instance = instance
        self._raw = hooks(declared.raw, "method")[name]
        self._kind = kind_of(self._raw)
        functools.update_wrapper(cast("Any", self), self._raw, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run here, as plain Python."""
        if self._instance is None:  # written as Class.method(instance, ...)
            owner, *rest = args
            if isinstance(owner, Instance):
                owner = owner._local()
            return cast("R", self._raw(owner, *rest, **kwargs))
        return cast("R", getattr(self._instance._local(), self._method_name)(*args, **kwargs))

    @property
    def _function_name(self) -> str:  # type: ignore[override]
        if self._instance is not None and any(self._instance._arguments):
            raise InvalidInput(
                f"{self._declared.__qualname__}(...) was given arguments, which stay here: a worker makes its instance "
                "without; pass them to the method, or deploy a second class"
            )
        return self._declared.name

    def _signature(self) -> inspect.Signature:
        signature = _signature_of(self._raw)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __repr__(self) -> str:
        return f"<Method {self._declared.name}.{self._method_name}>"


_END: Any = object()


@functools.lru_cache(maxsize=1024)
def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    named = dict(signature.bind(*args, **kwargs).arguments)
    others = [p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    for name in others:
        named |= named.pop(name, {})
    return named


def _length(iterables: Collection[Any]) -> int | None:
    """Of the shortest; None when one does not say."""
    lengths = [len(each) for each in iterables if isinstance(each, Sized)]
    return min(lengths) if lengths and len(lengths) == len(iterables) else None


def _blank(cls: type[T]) -> T:
    return object.__new__(cls)


def _run_hooks(instance: Any, hook: str) -> None:
    for name, function in hooks(type(instance), hook).items():
        if kind_of(function) is CallKind.ASYNC:
            run_coroutine(getattr(instance, name)())
        else:
            getattr(instance, name)()
