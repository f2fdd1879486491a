"""Conversion of type hints to a MethodSpec: the JSON Schema that the gateway checks requests with and OpenAPI shows.

A hint that JSON Schema cannot express (an array, a user's class, a name that cannot be resolved) allows any value. An
array has its datatype in `x-tensor`.
"""

from __future__ import annotations

import collections.abc
import inspect
import json
import sys
import types
import typing
from collections.abc import Callable, Collection
from pathlib import PurePath
from typing import Any, get_args, get_origin

import msgspec

from gpufn.call.remote import kind_of
from gpufn.declare.hints.batch_defaults import of_one_call
from gpufn.declare.hints.hint_adapters import HintAdapter, adapt_hint
from gpufn.declare.hints.tensor_hints import tensor_datatype
from gpufn.declare.hints.type_hints import resolve_hint, signature_of
from gpufn.declare.hooks import batch_of, hooks
from gpufn_core.encoding.hint_normalisation import computed_fields_optional, flag_schemas
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.function_spec import Batch, MethodSpec
from gpufn_core.spec.tensor_signature import DATATYPE

_REF = "#/$defs/{name}"
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_BYTES = (bytes, bytearray, memoryview)
# The return hints of generators. The first type argument is the type of the items.
_ITERATORS = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
    collections.abc.AsyncIterator,
    collections.abc.AsyncIterable,
    collections.abc.AsyncGenerator,
)


def methods_of(raw: Any, batch: Batch | None, models: Collection[str] = ()) -> tuple[MethodSpec, ...]:
    """Return a MethodSpec per callable of `raw`, a function or a class. Callers do not pass parameters in `models`."""
    if not isinstance(raw, type):
        return (_method_spec("", raw, skip=0, batched=batch is not None, models=models),)
    methods = []
    for name, function in hooks(raw, "method").items():
        try:
            own = batch_of(function, batch)
            method = _method_spec(name, function, skip=1, batched=own is not None)
            methods.append(method if own == batch else msgspec.structs.replace(method, batch=own))
        except InvalidSpec as error:
            raise InvalidSpec(f"{name}: {error.message}") from error
    return tuple(methods)


def constructor_of(cls: type) -> dict[str, Any] | msgspec.UnsetType:
    """Return the JSON Schema of the parameters of `__init__`; UNSET if it has none."""
    parameters = constructor_parameters(cls)
    if not parameters:
        return msgspec.UNSET
    hints = {p.name: resolve_hint(p.annotation, cls.__init__) for p in parameters}  # type: ignore[misc]
    return _parameters_schema(parameters, hints)


def constructor_parameters(cls: type) -> list[inspect.Parameter]:
    """Return the parameters of `__init__` that a caller can name."""
    init = cls.__init__  # type: ignore[misc]
    if not inspect.isfunction(init):  # inherited from `object`, or of an extension
        return []
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return [p for p in list(signature_of(init).parameters.values())[1:] if p.kind not in unnamed]


def _method_spec(
    name: str, function: Callable[..., Any], *, skip: int, batched: bool, models: Collection[str] = ()
) -> MethodSpec:
    signature = signature_of(function)
    parameters = [p for p in list(signature.parameters.values())[skip:] if p.name not in models]
    hints = {p.name: resolve_hint(p.annotation, function) for p in parameters}
    if batched:
        for parameter in parameters:
            hints[parameter.name] = _element_hint(parameter, hints[parameter.name])
        parameters = [of_one_call(parameter) for parameter in parameters]
    return MethodSpec(
        name=name,
        kind=kind_of(function),
        parameters=_parameters_schema(parameters, hints),
        returns=_returns_schema(resolve_hint(signature.return_annotation, function), function, batched),
        raw_parameter=_raw_parameter(parameters, hints),
        doc=inspect.getdoc(function) or "",
    )


def _element_hint(parameter: inspect.Parameter, hint: Any) -> Any:
    """Return the hint for the value of one call, given the hint for the list of a batch."""
    if parameter.kind is parameter.VAR_KEYWORD:
        raise InvalidSpec(f"with batch=..., {parameter.name} is a list with one value per call, so it is no **keywords")
    if hint is Any or hint in _LISTS or hint is typing.List:  # noqa: UP006
        return Any
    if get_origin(hint) in _LISTS:
        return get_args(hint)[0]
    raise InvalidSpec(f"with batch=..., {parameter.name} is a list with one value per call: write list[{_name(hint)}]")


def _parameters_schema(parameters: list[inspect.Parameter], hints: dict[str, Any]) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    required: list[str] = []
    additional: Any = False
    for parameter in parameters:
        hint = hints[parameter.name]
        if parameter.kind is parameter.VAR_KEYWORD:
            additional = schema_of(hint, definitions) or True
            continue
        if parameter.default is None and hint is not Any:
            hint = _optional(hint)
        schema = schema_of(hint, definitions)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif (default := _as_json(parameter.default)) is not _NOT_JSON:
            schema = {**schema, "default": default}
        properties[parameter.name] = schema
    schema = {"type": "object", "properties": properties, "additionalProperties": additional}
    if required:
        schema["required"] = required
    return schema | ({"$defs": definitions} if definitions else {})


def _returns_schema(hint: Any, function: Callable[..., Any], batched: bool) -> dict[str, Any]:
    if kind_of(function).streams:
        item = get_args(hint)[0] if get_origin(hint) in _ITERATORS and get_args(hint) else Any
        hint = Any if item is Any else types.GenericAlias(list, (item,))
    elif batched:
        hint = get_args(hint)[0] if get_origin(hint) in _LISTS else Any
    definitions: dict[str, Any] = {}
    schema = schema_of(hint, definitions)
    return schema | ({"$defs": definitions} if definitions else {})


def schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of `hint`. `{}` allows any value. Adds named parts to `definitions`, for `#/$defs/`."""
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    if (datatype := tensor_datatype(hint)) is not None:
        return {DATATYPE: datatype}

    def schema_hook(kind: type) -> dict[str, Any]:
        if isinstance(kind, HintAdapter):
            return _adapter_schema(kind, definitions)
        if isinstance(kind, type) and issubclass(kind, PurePath):
            return {"type": "string", "format": "path"}
        return _pydantic_schema(kind, definitions)

    try:
        with computed_fields_optional(hint):
            (schema,), named = msgspec.json.schema_components(
                [adapt_hint(hint)], schema_hook=schema_hook, ref_template=_REF
            )
    except Exception:  # msgspec, pydantic and the user's classes may raise anything
        return {}
    flags = flag_schemas(hint)
    for name, definition in named.items():
        _define(name, flags.get(name, definition) if "enum" in definition else definition, definitions)
    return schema


def _adapter_schema(kind: HintAdapter, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind.members:
        schemas = [schema_of(member, definitions) for member in kind.members]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    values = [_as_json(member.value) for member in kind.classes[0]]  # type: ignore[attr-defined]
    if any(value is _NOT_JSON for value in values):
        return {}
    _define(kind.__name__, {"title": kind.__name__, "enum": values}, definitions)
    return {"$ref": _REF.format(name=kind.__name__)}


def _pydantic_schema(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    pydantic = sys.modules.get("pydantic")  # loaded if `kind` is a pydantic model
    if pydantic is None or not isinstance(kind, type) or not issubclass(kind, pydantic.BaseModel):
        return {}
    schema = dict(kind.model_json_schema(ref_template="#/$defs/{model}"))  # type: ignore[attr-defined]
    for name, definition in schema.pop("$defs", {}).items():
        _define(name, definition, definitions)
    return schema


def _define(name: str, definition: Any, definitions: dict[str, Any]) -> None:
    if definitions.setdefault(name, definition) != definition:
        raise InvalidSpec(f"two different types are named {name}; rename one")


def _raw_parameter(parameters: list[inspect.Parameter], hints: dict[str, Any]) -> str | None:
    """Return the parameter that takes a raw request body.

    It is the only required parameter if its type is bytes, else the first parameter of type bytes.
    """
    bytes_names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and _takes_bytes(hints[p.name])]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return required[0] if len(required) == 1 and required[0] in bytes_names else next(iter(bytes_names), None)


def _takes_bytes(hint: Any) -> bool:
    if get_origin(hint) is typing.Annotated:
        return _takes_bytes(get_args(hint)[0])
    if get_origin(hint) in (typing.Union, types.UnionType):
        return any(_takes_bytes(part) for part in get_args(hint))
    return hint in _BYTES


def _optional(hint: Any) -> Any:
    try:
        return hint | None
    except TypeError:
        return typing.Union[hint, None]  # noqa: UP007


_NOT_JSON: Any = object()


def _as_json(value: Any) -> Any:
    """Return `value` as builtin types, or _NOT_JSON if a spec cannot hold it."""
    try:
        plain = msgspec.to_builtins(value)
        json.dumps(plain, allow_nan=False)
        msgspec.msgpack.encode(plain)  # the spec travels as msgpack, whose integers have 64 bits
    except (TypeError, ValueError, OverflowError):
        return _NOT_JSON
    return plain


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
