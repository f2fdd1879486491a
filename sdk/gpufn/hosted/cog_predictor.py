"""A cog predictor as a function: its parameters, its kind, and its calls."""

from __future__ import annotations

import asyncio
import collections.abc
import inspect
import os
import sys
import types
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from gpufn.hosted import cog_files
from gpufn.hosted import cog_module as cog
from gpufn_core.errors import InvalidInput, InvalidSpec

_STREAMS: Final = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    cog.ConcatenateIterator,
)
_ASYNC_STREAMS: Final = (
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
    cog.AsyncConcatenateIterator,
)
_FILES: Final = (cog.Path, cog.File)


class Parameters(NamedTuple):
    """The signature for callers; the parameters that take files; the choices that the signature cannot express."""

    signature: inspect.Signature
    files: dict[str, type]
    choices: dict[str, tuple[Any, ...]]


def install() -> None:
    """Make the replacement importable as `cog`."""
    sys.modules["cog"] = cog


def serve(target: Any, module: str) -> Callable[..., Any]:
    """Create the predictor, run its `setup`, and return its function. Workers call it."""
    return as_function(target, module, _set_up(target()) if isinstance(target, type) else target)


def as_function(target: Any, module: str, call: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a predictor as a function of `module`. Without `call`, it cannot be called."""
    raw = _method_of(target)
    parameters = parameters_of(raw, skip=int(isinstance(target, type)))
    function = _of_kind(raw, call or raw, parameters)
    function.__signature__ = parameters.signature  # type: ignore[attr-defined]
    function.__module__, function.__name__, function.__qualname__ = module, "function", "function"
    function.__doc__ = inspect.getdoc(raw)
    return function


def _method_of(target: Any) -> Callable[..., Any]:
    """Return `predict` or `run` of a class, or the function itself. Raises InvalidSpec."""
    if not isinstance(target, type):
        if not callable(target):
            raise InvalidSpec(f"{target!r} is neither a predictor class nor a function")
        return target  # type: ignore[no-any-return]
    for name in ("predict", "run"):
        if inspect.isfunction(method := getattr(target, name, None)):
            return method
    raise InvalidSpec(f"{target.__name__} has no method predict")


def _set_up(instance: Any) -> Callable[..., Any]:
    """Run `setup`, and return the bound method."""
    setup = getattr(instance, "setup", None)
    if callable(setup):
        takes_weights = "weights" in inspect.signature(setup).parameters
        result = setup(weights=os.environ.get("COG_WEIGHTS")) if takes_weights else setup()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    method: Callable[..., Any] = getattr(instance, _method_of(type(instance)).__name__)
    return method


def parameters_of(raw: Callable[..., Any], skip: int) -> Parameters:
    """Convert the parameters of `predict` with their `Input(...)` to a signature with plain hints."""
    signature = inspect.signature(raw)
    try:
        hints = typing.get_type_hints(raw, include_extras=True)
    except Exception:  # evaluates code of the user's, which may raise anything
        hints = {}
    files: dict[str, type] = {}
    choices: dict[str, tuple[Any, ...]] = {}
    plain: list[inspect.Parameter] = []
    for parameter in list(signature.parameters.values())[skip:]:
        name, given = parameter.name, parameter.default
        described = (
            given
            if isinstance(given, cog.InputField)
            else cog.InputField(cog._UNSET if given is parameter.empty else given)
        )
        hint = hints.get(name, Any)
        if (file := _file_in(hint)) is not None:
            files[name] = file
        if described.choices is not None:
            choices[name] = described.choices
        default = parameter.empty if described.is_required else described.default
        hint = _with_constraints(_plain(hint), described)
        plain.append(inspect.Parameter(name, parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return Parameters(inspect.Signature(plain, return_annotation=_plain(hints.get("return", Any))), files, choices)


def _file_in(hint: Any) -> type | None:
    """Return the kind of file in a hint such as `list[Path] | None`, if there is one."""
    if hint in _FILES:
        return hint  # type: ignore[no-any-return]
    return next((found for each in get_args(hint) if (found := _file_in(each)) is not None), None)


def _plain(hint: Any) -> Any:
    """Return a hint in terms of JSON: a file is the text of a URL."""
    if hint in _FILES:
        return Annotated[str, msgspec.Meta(extra_json_schema={"format": "uri"})]
    origin, arguments = get_origin(hint), tuple(map(_plain, get_args(hint)))
    if origin in (Union, types.UnionType):
        return Union[arguments]  # noqa: UP007  of a tuple
    if origin in (list, dict, tuple, set):
        return origin[arguments]
    if origin in (*_STREAMS, *_ASYNC_STREAMS):
        kind: Any = collections.abc.Iterator if origin in _STREAMS else collections.abc.AsyncIterator
        return kind[arguments[0]]
    is_plain = hint in (str, int, float, bool, bytes, dict, list, type(None)) or origin is Literal
    return str if hint is cog.Secret else hint if is_plain else Any


def _with_constraints(hint: Any, described: cog.InputField) -> Any:
    if described.choices and all(isinstance(each, (str, int)) for each in described.choices):
        allowed = described.choices if described.default is not None else (*described.choices, None)
        hint = Literal[allowed]
    limits = {
        "ge": described.ge,
        "le": described.le,
        "min_length": described.min_length,
        "max_length": described.max_length,
        "pattern": described.regex,
        "description": described.description,
    }
    given: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    if hint is Any or get_origin(hint) is Literal:
        given = {name: value for name, value in given.items() if name == "description"}
    return Annotated[hint, msgspec.Meta(**given)] if given else hint


def _of_kind(raw: Callable[..., Any], call: Callable[..., Any], parameters: Parameters) -> Callable[..., Any]:
    """Return a function of the kind that `predict` has. A function that returns an iterator is a generator."""
    origin = get_origin(parameters.signature.return_annotation)
    signature = parameters.signature
    defaults = {each.name: each.default for each in signature.parameters.values() if each.default is not each.empty}

    def begin(given: dict[str, Any]) -> Any:
        given = defaults | given  # the function's own defaults are the descriptions of its inputs
        for name, allowed in parameters.choices.items():
            if name in given and given[name] is not None and given[name] not in allowed:
                raise InvalidInput(f"{name}: must be one of {', '.join(map(repr, allowed))}", field=name)
        return cog_files.input_files(given, parameters.files)

    if inspect.isasyncgenfunction(raw) or origin is collections.abc.AsyncIterator:

        async def async_items(**given: Any) -> AsyncIterator[Any]:
            with begin(given) as arguments:
                result = call(**arguments)
                if inspect.isawaitable(result):
                    result = await result
                async for item in result:
                    yield cog_files.output(item)

        return async_items
    if inspect.isgeneratorfunction(raw) or origin is collections.abc.Iterator:

        def items(**given: Any) -> Iterator[Any]:
            with begin(given) as arguments:
                for item in call(**arguments):
                    yield cog_files.output(item)

        return items
    if inspect.iscoroutinefunction(raw):

        async def coroutine(**given: Any) -> Any:
            with begin(given) as arguments:
                return cog_files.output(await call(**arguments))

        return coroutine

    def plain(**given: Any) -> Any:
        with begin(given) as arguments:
            return cog_files.output(call(**arguments))

    return plain
