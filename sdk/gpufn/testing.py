"""For tests of code that uses gpufn: `.remote` and its siblings without a platform.

`run_locally` runs each remote call in this process. Arguments and results are encoded and decoded on the way, and a
failure arrives as FunctionRaised, so that what works here works there. What a worker does with the types of arguments
it does not: refuse a str for an int, or make the dataclass of a dict.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

from gpufn.call import transport as _transport
from gpufn.call.context import attempt_here
from gpufn.call.remote import kind_of
from gpufn.call.threads import run_coroutine
from gpufn.declare.declarations import declared_here
from gpufn.declare.function import Function, FunctionClass, Instance
from gpufn.declare.hooks import hooks
from gpufn.declare.type_hints import resolved, signature_of
from gpufn_core.domain.invocation import InvocationState, Outcome, OutcomeKind, Settlement, settlement_for
from gpufn_core.encoding import media, values
from gpufn_core.encoding.raised_types import classes_of
from gpufn_core.encoding.record_classes import RecordClasses
from gpufn_core.errors import ErrorInfo, FunctionNotFound, FunctionRaised, GpufnError, InvalidInput, InvocationNotFound
from gpufn_core.ids import new_invocation_id
from gpufn_core.spec.function_spec import CallKind, Retry, function_name
from gpufn_core.spec.priority import Priority

T = TypeVar("T")

__all__ = ["LocalTransport", "RemoteCall", "run_locally"]

# What the calls that a class's method makes take turns by. It is not what the method has its own turn by: it waits for
# them, and they may run in other threads, as those of a map do.
_turns: ContextVar[threading.RLock] = ContextVar("_turns")


class RemoteCall(NamedTuple):
    """A call that was made: the function's name (`name.method` for a class) and its arguments."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextlib.contextmanager
def run_locally(**replacements: Callable[..., Any]) -> Iterator[LocalTransport]:
    """Inside the `with`, remote calls run here. A replacement runs in place of the function of its name.

    Arguments are passed as they are; on the platform those of a wrong type are refused. A call that fails is retried as
    the function's `retries` say, without the delays between attempts.

    >>> from gpufn import gpu_function
    >>> @gpu_function(gpu="H100")
    ... def describe(image: bytes) -> str:
    ...     raise RuntimeError("there is no GPU here")
    >>> with run_locally(describe=lambda image: f"{len(image)} bytes") as platform:
    ...     describe.remote(b"abc")
    '3 bytes'
    >>> platform.calls
    [RemoteCall(function='describe', args=(b'abc',), kwargs={})]
    """
    before = _transport.installed()
    with contextlib.closing(LocalTransport(replacements)) as transport:
        _transport.install(transport)
        try:
            yield transport
        finally:
            _transport.install(before)


class LocalTransport:
    """A Transport that runs calls in this process; `calls` has them in their order."""

    def __init__(self, replacements: dict[str, Callable[..., Any]] | None = None) -> None:
        self.calls: list[RemoteCall] = []
        self._replacements = {function_name(name): function for name, function in (replacements or {}).items()}
        self._instances: dict[str, Instance] = {}
        self._ended: dict[str, tuple[str, bytes] | GpufnError] = {}
        self._first_turns = threading.RLock()

    def call(
        self,
        function: str,
        method: str,
        content_type: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> tuple[str, bytes]:
        with _raised_remotely():
            run = self._prepared(function, method, content_type, body)
            result = _retried(_retries_of(function), lambda: _collected(run()))
        return values.encode_result(result, media.NATIVE, may_pickle=_may_pickle(function))

    def stream(
        self,
        function: str,
        method: str,
        content_type: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> Iterator[tuple[str, bytes]]:
        with _raised_remotely():
            for item in self._prepared(function, method, content_type, body)():
                yield values.encode_result(item, media.NATIVE, may_pickle=_may_pickle(function))

    def submit(
        self,
        function: str,
        method: str,
        content_type: str,
        body: bytes,
        *,
        timeout_s: float | None = None,
        priority: Priority | None = None,
    ) -> str:
        invocation = new_invocation_id()
        try:
            self._ended[invocation] = self.call(function, method, content_type, body)
        except GpufnError as error:
            self._ended[invocation] = error
        return invocation

    def status(self, invocation: str) -> InvocationState:
        failed = isinstance(self._end_of(invocation), GpufnError)
        return InvocationState.FAILED if failed else InvocationState.SUCCEEDED

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        end = self._end_of(invocation)
        if isinstance(end, GpufnError):
            raise end
        return end

    def cancel(self, invocation: str) -> bool:
        self._end_of(invocation)
        return False

    def close(self) -> None:
        """End the instances that were made, as their workers would."""
        instances, self._instances = self._instances, {}
        with contextlib.ExitStack() as stack:
            for instance in reversed(instances.values()):
                stack.push(instance)

    def _end_of(self, invocation: str) -> tuple[str, bytes] | GpufnError:
        try:
            return self._ended[invocation]
        except KeyError:
            raise InvocationNotFound(f"there is no invocation {invocation} here") from None

    def _prepared(self, name: str, method: str, content_type: str, body: bytes) -> Callable[[], Any]:
        """Record the call, and return a callable that makes one attempt of it."""
        is_pickled = content_type == media.PICKLED and _may_pickle(name)
        find = RecordClasses(lambda: _hints_of(name, method)).find
        args, kwargs = values.decode_call(body, allow_pickle=is_pickled, find=find)
        self.calls.append(RemoteCall(f"{name}.{method}" if method else name, tuple(args), kwargs))
        replacement = self._replacements.get(name)
        if replacement is not None:
            return lambda: _plainly(replacement if not method else getattr(replacement, method), args, kwargs)
        function = _declared(name)
        if isinstance(function, Function):
            return lambda: _called(function, function.runnable(), args, kwargs)
        return lambda: self._run_method(name, function, method, args, kwargs)

    def _run_method(
        self, name: str, function: FunctionClass, method: str, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        with self._one_at_a_time():
            instance = self._instances.setdefault(name, function())
            return _called(function, getattr(instance._local(), method), args, kwargs)

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """A class's instance is used as one worker would use it."""
        with _turns.get(self._first_turns):
            token = _turns.set(threading.RLock())
            try:
                yield
            finally:
                _turns.reset(token)


def _may_pickle(name: str) -> bool:
    return any(function.settings.pickle for function in declared_here(name))


def _hints_of(name: str, method: str) -> Iterator[Any]:
    """Of the parameters, which say what instances arguments may be."""
    for declared in declared_here(name):
        function = hooks(cast("type", declared.raw), "method").get(method) if method else declared.raw
        if function is not None:
            for parameter in signature_of(function).parameters.values():
                yield resolved(parameter.annotation, function)


def _declared(name: str) -> Function[..., Any, Any] | FunctionClass:
    found = declared_here(name)
    if not found:
        raise FunctionNotFound(f"no @gpu_function named {name} has been imported here")
    if len(found) > 1:
        places = ", ".join(f"{function.raw.__module__}.{function.raw.__qualname__}" for function in found)
        raise InvalidInput(f"more than one function would be deployed as {name}: {places}; give one another name=...")
    return cast("Function[..., Any, Any] | FunctionClass", found[0])


def _called(declared: Any, callable_: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    if declared.settings.batch is None:
        return _plainly(callable_, args, kwargs)
    results = _plainly(callable_, [[value] for value in args], {name: [value] for name, value in kwargs.items()})
    return results[0]


def _retries_of(name: str) -> Retry | None:
    """Return the retry policy of the declared function; a replacement may have none."""
    found = declared_here(name)
    return found[0].settings.retries if len(found) == 1 else None


def _retried(retries: Retry | None, attempt: Callable[[], T]) -> T:
    """Make attempts as the runner would, without its delays between them."""
    for retried in itertools.count():
        try:
            with attempt_here(retried + 1):
                return attempt()
        except GpufnError:
            raise
        except Exception as error:
            names = tuple(base.__qualname__ for base in type(error).__mro__)
            info = ErrorInfo("function_raised", "", error_bases=names)
            if settlement_for(Outcome(OutcomeKind.RAISED, info), retries, retried) is not Settlement.RETRY:
                raise
    raise AssertionError("attempts are counted without end")


def _collected(result: Any) -> Any:
    return list(result) if isinstance(result, Iterator) else result


def _plainly(callable_: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A value, or an iterator of values: coroutines and async generators are run."""
    result = callable_(*args, **kwargs)
    kind = kind_of(callable_)
    if kind is CallKind.ASYNC:
        return run_coroutine(result)
    if kind is CallKind.ASYNC_GENERATOR:
        return iter(run_coroutine(_listed(result)))
    return result


async def _listed(items: AsyncIterator[T]) -> list[T]:
    return [item async for item in items]


@contextlib.contextmanager
def _raised_remotely() -> Iterator[None]:
    try:
        yield
    except GpufnError:
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        name = type(error).__qualname__
        classes = classes_of(type(error))
        raise FunctionRaised(str(error) or name, error_type=name, traceback=text, error_classes=classes) from error
