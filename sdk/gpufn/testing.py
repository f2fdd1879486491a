"""Tools to test code that uses gpufn without a platform: `.remote` and the other remote calls run in this process.

`run_locally` encodes and decodes arguments and results as the platform does, and raises a failure as FunctionRaised. So
code that passes here also works on the platform, with one exception: `run_locally` does not convert or check argument
types. A worker refuses a str for an int, and makes a dataclass from a dict.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import unquote

import msgspec

from gpufn.call import transport as _transport
from gpufn.call.context import local_attempt
from gpufn.call.remote import kind_of
from gpufn.call.threads import run_coroutine
from gpufn.call.transport_protocol import EncodedCall
from gpufn.data import channel as _data
from gpufn.data.local_channel import LocalChannel
from gpufn.declare.declarations import declarations_of
from gpufn.declare.function import Function, FunctionClass, Instance
from gpufn.declare.hints.type_hints import resolve_hint, signature_of
from gpufn.declare.hooks import batch_of, hooks
from gpufn_core.domain.invocation import InvocationState, Outcome, OutcomeKind
from gpufn_core.domain.retry_policy import Settlement, settlement_for
from gpufn_core.encoding import media, values
from gpufn_core.encoding.raised_types import classes_of
from gpufn_core.encoding.record_classes import RecordClasses
from gpufn_core.errors import ErrorInfo, FunctionNotFound, FunctionRaised, GpufnError, InvalidInput, InvocationNotFound
from gpufn_core.ids import new_invocation_id
from gpufn_core.spec.function_spec import CallKind, Retry
from gpufn_core.spec.naming.names import function_name
from gpufn_core.spec.naming.variant_names import described, split
from gpufn_core.spec.naming.variant_options import MARK

T = TypeVar("T")

__all__ = ["LocalTransport", "RemoteCall", "run_locally"]

# The lock for the nested calls that a class's method makes. The method itself holds another lock, because it waits for
# its nested calls, and these may run in other threads, as the calls of a map do.
_nested_lock: ContextVar[threading.RLock] = ContextVar("_nested_lock")


class RemoteCall(NamedTuple):
    """A recorded call: the name of the function (`name.method` for a class) and the arguments."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@contextlib.contextmanager
def run_locally(**replacements: Callable[..., Any]) -> Iterator[LocalTransport]:
    """Run remote calls in this process, inside the `with` block. A replacement runs in place of the function it names.
    Queues, dicts and stored values are in memory, and empty at first.

    Argument types are not checked; the platform refuses a wrong type. A failed call is retried according to the
    function's `retries`, without delays between attempts.

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
    before, data_before = _transport.installed(), _data.installed()
    with contextlib.closing(LocalTransport(replacements)) as transport:
        _transport.install(transport)
        _data.install(LocalChannel())
        try:
            yield transport
        finally:
            _transport.install(before)
            _data.install(data_before)


class LocalTransport:
    """A Transport that runs calls in this process. `calls` lists them in the order they were made."""

    def __init__(self, replacements: dict[str, Callable[..., Any]] | None = None) -> None:
        self.calls: list[RemoteCall] = []
        self._replacements = {function_name(name): function for name, function in (replacements or {}).items()}
        self._instances: dict[str, Instance] = {}
        self._outcomes: dict[str, tuple[str, bytes] | GpufnError] = {}
        self._outer_lock = threading.RLock()

    def call(self, call: EncodedCall) -> tuple[str, bytes]:
        with _raise_as_remote():
            run = self._prepare(call)
            result = _run_with_retries(_retries_of(_name_of(call)), lambda: _collect(run()))
        return values.encode_result(result, media.NATIVE, may_pickle=_may_pickle(_name_of(call)))

    def stream(self, call: EncodedCall) -> Iterator[tuple[str, bytes]]:
        with _raise_as_remote():
            for item in self._prepare(call)():
                yield values.encode_result(item, media.NATIVE, may_pickle=_may_pickle(_name_of(call)))

    def submit(self, call: EncodedCall) -> str:
        invocation = new_invocation_id()
        try:
            self._outcomes[invocation] = self.call(call)
        except GpufnError as error:
            self._outcomes[invocation] = error
        return invocation

    def status(self, invocation: str) -> InvocationState:
        failed = isinstance(self._outcome_of(invocation), GpufnError)
        return InvocationState.FAILED if failed else InvocationState.SUCCEEDED

    def result(self, invocation: str, *, timeout_s: float | None = None) -> tuple[str, bytes]:
        outcome = self._outcome_of(invocation)
        if isinstance(outcome, GpufnError):
            raise outcome
        return outcome

    def cancel(self, invocation: str) -> bool:
        self._outcome_of(invocation)
        return False

    def close(self) -> None:
        """Run the `@exit` methods of all instances, as their workers would."""
        instances, self._instances = self._instances, {}
        with contextlib.ExitStack() as stack:
            for instance in reversed(instances.values()):
                stack.push(instance)

    def _outcome_of(self, invocation: str) -> tuple[str, bytes] | GpufnError:
        try:
            return self._outcomes[invocation]
        except KeyError:
            raise InvocationNotFound(f"no invocation {invocation} was submitted in this process") from None

    def _prepare(self, call: EncodedCall) -> Callable[[], Any]:
        """Record the call and return a callable that makes one attempt of it."""
        pool, method, _ = call.target
        name, selector, _ = split(pool)
        is_pickled = call.content_type == media.PICKLED and _may_pickle(name)
        find = RecordClasses(lambda: _hints_of(name, method)).find
        args, kwargs = values.decode_call(call.body, allow_pickle=is_pickled, find=find)
        selected = msgspec.json.decode(unquote(selector)) if selector else {}
        shown = described(name, selected) if selected else name
        parameters = {key: value for key, value in selected.items() if not key.startswith(MARK)}
        self.calls.append(RemoteCall(f"{shown}.{method}" if method else shown, tuple(args), kwargs))
        replacement = self._replacements.get(name)
        if replacement is not None:
            return lambda: _call_sync(replacement if not method else getattr(replacement, method), args, kwargs)
        function = _find_declared(name)
        if isinstance(function, Function):
            return lambda: _call_declared(function, function.runnable(), args, kwargs)
        instance = self._instances.setdefault(pool, function(**parameters))
        return lambda: self._run_method(instance, method, args, kwargs)

    def _run_method(self, instance: Instance, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        with self._one_at_a_time():
            return _call_declared(instance._declared, getattr(instance._local(), method), args, kwargs)

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Serialize the calls of a class's instance, as a single worker would."""
        with _nested_lock.get(self._outer_lock):
            token = _nested_lock.set(threading.RLock())
            try:
                yield
            finally:
                _nested_lock.reset(token)


def _name_of(call: EncodedCall) -> str:
    """Return the function of a call, without the parameters of a class."""
    return split(call.target.function).function


def _may_pickle(name: str) -> bool:
    return any(function.settings.pickle for function in declarations_of(name))


def _hints_of(name: str, method: str) -> Iterator[Any]:
    """Yield the hints of the parameters: they name the classes whose instances arguments may be."""
    for declared in declarations_of(name):
        function = hooks(cast("type", declared.raw), "method").get(method) if method else declared.raw
        if function is not None:
            for parameter in signature_of(function).parameters.values():
                yield resolve_hint(parameter.annotation, function)


def _find_declared(name: str) -> Function[..., Any, Any] | FunctionClass:
    matches = declarations_of(name)
    if not matches:
        raise FunctionNotFound(f"this process has imported no @gpu_function named {name}")
    if len(matches) > 1:
        places = ", ".join(f"{function.raw.__module__}.{function.raw.__qualname__}" for function in matches)
        raise InvalidInput(
            f"several functions would be deployed as {name}: {places}; use name=... to give each its own name"
        )
    return cast("Function[..., Any, Any] | FunctionClass", matches[0])


def _call_declared(declared: Any, callable_: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function or a method; a batch function gets a batch of this one call."""
    if batch_of(callable_, declared.settings.batch) is None:
        return _call_sync(callable_, args, kwargs)
    results = _call_sync(callable_, [[value] for value in args], {name: [value] for name, value in kwargs.items()})
    return results[0]


def _retries_of(name: str) -> Retry | None:
    """Return the retry policy of the declared function; a replacement may have no declared function."""
    declared = declarations_of(name)
    return declared[0].settings.retries if len(declared) == 1 else None


def _run_with_retries(retries: Retry | None, attempt: Callable[[], T]) -> T:
    """Retry as the runner does, without its delays between attempts."""
    for retry in itertools.count():
        try:
            with local_attempt(retry + 1):
                return attempt()
        except GpufnError:
            raise
        except Exception as error:
            names = tuple(base.__qualname__ for base in type(error).__mro__)
            info = ErrorInfo("function_raised", "", error_bases=names)
            if settlement_for(Outcome(OutcomeKind.RAISED, info), retries, retry) is not Settlement.RETRY:
                raise
    raise AssertionError("unreachable: itertools.count() does not end")


def _collect(result: Any) -> Any:
    return list(result) if isinstance(result, Iterator) else result


def _call_sync(callable_: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return a value or an iterator of values. Coroutines and async generators run to their end."""
    result = callable_(*args, **kwargs)
    kind = kind_of(callable_)
    if kind is CallKind.ASYNC:
        return run_coroutine(result)
    if kind is CallKind.ASYNC_GENERATOR:
        return iter(run_coroutine(_as_list(result)))
    return result


async def _as_list(items: AsyncIterator[T]) -> list[T]:
    return [item async for item in items]


@contextlib.contextmanager
def _raise_as_remote() -> Iterator[None]:
    """Turn exceptions of user code into FunctionRaised, as they arrive from a worker."""
    try:
        yield
    except GpufnError:
        raise
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        name = type(error).__qualname__
        classes = classes_of(type(error))
        raise FunctionRaised(str(error) or name, error_type=name, traceback=text, error_classes=classes) from error
