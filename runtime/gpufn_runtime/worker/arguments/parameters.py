"""Decode a call's body into the arguments of the user's function, and reject bad input before user code runs.

JSON and msgpack may come from any client and are converted strictly to the type hints. The SDK's own encoding carries
Python values and has the semantics of a call in one process. Values are passed unchanged, but rejected like JSON if the
hint consists of plain types and the value has a wrong plain type. A class in a hint creates its instances itself from
the fields that were sent (`instances`). Parameters of a function with `batch=` are lists with one value per call; here
each parameter takes one value.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Callable, Container, Iterator
from typing import Any, Protocol

import msgspec

from gpufn.call.remote import describe_parameters
from gpufn.declare.hints.batch_defaults import of_one_call
from gpufn.declare.hints.hint_adapters import HintAdapter, adapt_hint
from gpufn.declare.hints.type_hints import resolve_hint, signature_of
from gpufn_core.encoding import media, native, values
from gpufn_core.encoding.hint_normalisation import computed_fields_optional
from gpufn_core.encoding.msgspec_errors import describe_json_error, number_field, parse_validation_error
from gpufn_core.encoding.record_classes import RecordClasses
from gpufn_core.errors import InvalidInput, RequestError, UnsupportedMediaType, pickles_refused
from gpufn_runtime.worker.arguments.defaults import fill_defaults, may_hold_dataclass
from gpufn_runtime.worker.arguments.instances import BYTES, Instances, model_of
from gpufn_runtime.worker.execute.error_report import message_of

_QUOTED = re.compile(r"'(\w+)'")
_MISSING: Any = object()
_PLAIN = (type(None), bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, set, frozenset, dict)


class Reader(Protocol):
    """Decodes a call's body."""

    def bind(self, content_type: str, body: bytes | memoryview) -> tuple[list[Any], dict[str, Any]]: ...

    def by_name(self, content_type: str, body: bytes | memoryview) -> dict[str, Any]: ...


class _Sent(msgspec.Struct):
    """A call in the SDK's encoding with undecoded arguments."""

    args: list[msgspec.Raw] = []
    kwargs: dict[str, msgspec.Raw] = {}


class Parameters:
    """The parameters of one callable. `signature` excludes `self` and the `provided` parameters, which the worker
    passes itself."""

    def __init__(
        self,
        call: Callable[..., Any],
        *,
        raw_parameter: str | None = None,
        batched: bool = False,
        provided: Container[str] = (),
        may_pickle: bool = False,
    ) -> None:
        full = signature_of(call)
        own = [parameter for name, parameter in full.parameters.items() if name not in provided]
        self.signature = full.replace(parameters=list(map(of_one_call, own)) if batched else own)
        self._raw_parameter = raw_parameter
        self._may_pickle = may_pickle
        self._classes = RecordClasses(lambda: [resolve_hint(p.annotation, call) for p in full.parameters.values()])
        self._instances = Instances(_convert)
        self._decode_options: Any = {  # options for decoding the SDK's encoding
            "find": self._classes.find,
            "make": self._instances.make,
            "remedy": values.OTHER_TYPE if may_pickle else values.NO_PICKLES,
        }
        self._hints = {
            parameter.name: _hint_of(parameter, call, batched=batched)
            for parameter in self.signature.parameters.values()
        }
        checked = {name: _python_hint(hint) for name, hint in self._hints.items()}
        # One Struct per parameter, so that msgspec analyzes the hint only once.
        self._holders = {
            name: msgspec.defstruct("Holder", [(name, hint)]) for name, hint in checked.items() if hint is not Any
        }
        self._of_class = {name for name, hint in checked.items() if _names_class(hint)}
        self._with_defaults = {name for name, hint in self._hints.items() if may_hold_dataclass(hint)}
        # The `**kwargs` parameter, if there is one.
        self._kwargs_name = next((p.name for p in self.signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        self._by_position = [p.name for p in self.signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
        self._struct = None if self._kwargs_name is not None else self._make_struct()
        form = dict[str, Any] if self._struct is None else self._struct
        self._from_json = msgspec.json.Decoder(form, dec_hook=_convert).decode
        self._from_msgpack = msgspec.msgpack.Decoder(form, dec_hook=_convert).decode

    def bind(self, content_type: str, body: bytes | memoryview) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments. Raises a RequestError that names the mismatch."""
        try:
            return self._bind(media.media_type(content_type), body, content_type)
        except RequestError:
            raise
        except BaseException as error:  # raised by a user's validator or constructor
            detail = f"{type(error).__qualname__}: {message_of(error)}"
            raise InvalidInput(f"cannot read the input: {detail}") from error

    def bind_values(self, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return positional and keyword arguments for Python values by name. Raises InvalidInput."""
        _, kwargs = self._check_signature([], given)
        fitted = {
            name: self._fitted(self._parameter_of(name), value, name, is_trusted=False)
            for name, value in kwargs.items()
        }
        return self._place_positionals(fitted)

    def by_name(self, content_type: str, body: bytes | memoryview) -> dict[str, Any]:
        """Return one value per parameter, with defaults filled in."""
        args, kwargs = self.bind(content_type, body)
        return self._with_defaults_by_name(args, kwargs)

    def values_by_name(self, given: dict[str, Any]) -> dict[str, Any]:
        """Like `bind_values`, but return one value per parameter, with defaults filled in."""
        return self._with_defaults_by_name(*self.bind_values(given))

    def _with_defaults_by_name(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def _bind(self, kind: str, body: bytes | memoryview, content_type: str) -> tuple[list[Any], dict[str, Any]]:
        if kind == media.JSON:
            return self._from_map(self._from_json, body or b"{}", "JSON")
        if kind == media.MSGPACK:
            return self._from_map(self._from_msgpack, body or b"\x80", "msgpack")
        if kind == media.NATIVE:
            return self._from_native(body)
        if kind == media.PICKLED:
            if not self._may_pickle:
                raise UnsupportedMediaType(pickles_refused("the function"))
            return self._from_native(body, allow_pickle=True)
        if self._raw_parameter is None:
            if body:
                raise values.unsupported(content_type)
            return self._check_signature([], {})
        return self._place_positionals(self._check_signature([], {self._raw_parameter: bytes(body)})[1])

    def _from_map(
        self, decode: Callable[[bytes | memoryview], Any], body: bytes | memoryview, form: str
    ) -> tuple[list[Any], dict[str, Any]]:
        try:
            decoded = decode(body)
        except msgspec.ValidationError as error:
            raise self._refusal(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if form == "JSON" and (field := number_field(body)):
                raise InvalidInput(f"{field}: {describe_json_error(error, body)}", field=field) from error
            raise InvalidInput(f"the body is not valid {form}: {describe_json_error(error, body)}") from error
        if self._struct is not None:
            fields = ((name, getattr(decoded, name)) for name in decoded.__struct_fields__)
            return self._place_positionals(
                {name: self._with_missing_defaults(name, value) for name, value in fields if value is not _MISSING}
            )
        converted = {}
        for name, value in decoded.items():
            try:
                parameter = self._parameter_of(name)
                hint = self._hints.get(parameter, Any)
                converted[name] = self._with_missing_defaults(
                    parameter, msgspec.convert(value, hint, dec_hook=_convert)
                )
            except msgspec.ValidationError as error:
                raise self._refusal(str(error), within=name) from error
        return self._place_positionals(self._check_signature([], converted)[1])

    def _from_native(self, body: bytes | memoryview, *, allow_pickle: bool = False) -> tuple[list[Any], dict[str, Any]]:
        try:
            decoded = values.decode_call(body, allow_pickle=allow_pickle, **self._decode_options)
        except InvalidInput as error:
            raise error if allow_pickle else self._locate_error(body, error) from error
        args, kwargs = self._check_signature(*decoded)
        args = [
            self._fitted(name, value, label, is_trusted=allow_pickle)
            for (name, label), value in zip(self._positions(), args, strict=False)
        ]
        return args, {
            name: self._fitted(self._parameter_of(name), value, name, is_trusted=allow_pickle)
            for name, value in kwargs.items()
        }

    def _locate_error(self, body: bytes | memoryview, error: InvalidInput) -> InvalidInput:
        """Return `error` with the name of the argument that cannot be decoded."""
        try:
            sent = msgspec.msgpack.decode(body, type=_Sent)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return error
        labeled = zip((label for _, label in self._positions()), sent.args, strict=False)
        for name, part in itertools.chain(labeled, sent.kwargs.items()):
            try:
                native.decode(part, **self._decode_options)
            except InvalidInput as cause:
                return InvalidInput(f"{name}: {cause.message}", field=name)
        return error

    def _positions(self) -> Iterator[tuple[str, str]]:
        """Yield the parameter of each positional argument, and the label of the argument."""
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                yield from ((parameter.name, f"{parameter.name}[{number}]") for number in itertools.count())
            yield parameter.name, parameter.name

    def _parameter_of(self, keyword: str) -> str:
        """Return the parameter whose hint applies to a keyword argument."""
        return keyword if keyword in self._hints or self._kwargs_name is None else self._kwargs_name

    def _fitted(self, name: str, value: Any, label: str, *, is_trusted: bool) -> Any:
        """Check a Python value for a parameter; return it unchanged, or as an instance of the class in the hint.

        `label` names the argument. A trusted sender may run code, so an object that only a pickle can carry may replace
        an instance.
        """
        holder = self._holders.get(name)
        if holder is None:
            return value
        try:
            holder_value = msgspec.convert({name: value}, holder, builtin_types=BYTES, dec_hook=_convert)
        except msgspec.ValidationError:
            is_plain = _is_plain(value)
            if not is_plain and (is_trusted or name not in self._of_class):
                return value  # a value of another type may replace a plain value: a float32 a float
            convert = _convert_plain if is_plain else self._instances.convert
            try:
                return self._with_missing_defaults(name, convert(value, self._hints[name]))
            except msgspec.ValidationError as error:
                raise self._refusal(str(error), within=label) from error
        return self._with_missing_defaults(name, getattr(holder_value, name)) if name in self._of_class else value

    def _with_missing_defaults(self, name: str, value: Any) -> Any:
        return fill_defaults(value) if name in self._with_defaults else value

    def _check_signature(self, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        try:
            self.signature.bind(*args, **kwargs) if not self._by_position else self._bind_by_name(args, kwargs)
        except TypeError as error:
            name = _QUOTED.search(str(error))
            raise InvalidInput(
                f"{error}; it takes {describe_parameters(self.signature)}", field=name and name[1]
            ) from error
        return args, kwargs

    def _bind_by_name(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        placed, rest = self._place_positionals(dict(kwargs)) if not args else (args, kwargs)
        self.signature.bind(*placed, **rest)

    def _place_positionals(self, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Move positional-only parameters, which JSON also passes by name, to their positions."""
        if not self._by_position:
            return [], kwargs
        args = []
        for name in self._by_position:
            if name not in kwargs:
                break
            args.append(kwargs.pop(name))
        return args, kwargs

    def _make_struct(self) -> Any:
        fields: list[Any] = []
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                continue
            field = (parameter.name, self._hints[parameter.name])
            fields.append(field if parameter.default is parameter.empty else (*field, _MISSING))
        return msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)

    def _refusal(self, text: str, within: str = "") -> InvalidInput:
        """Format msgspec's ``Expected `str`, got `int` - at `$.texts[0]` `` as ``texts[0]: expected str, got int``."""
        mismatch = parse_validation_error(text, within)
        path = mismatch.path
        if mismatch.is_missing:
            return InvalidInput(f"{path}: missing", field=path)
        if mismatch.is_unknown:
            takes = f"parameter; it takes {describe_parameters(self.signature)}" if not mismatch.at else "field"
            return InvalidInput(f"{path}: there is no such {takes}", field=path)
        if mismatch.is_key:
            return InvalidInput(f"a key of {path or 'the body'}: {mismatch.text}", field=path or None)
        if not path:
            return InvalidInput(f"the body must be a map from parameters to values: {mismatch.text}")
        return InvalidInput(f"{path}: {mismatch.text}", field=path)


def _hint_of(parameter: inspect.Parameter, call: Callable[..., Any], *, batched: bool) -> Any:
    hint = resolve_hint(parameter.annotation, call)
    if batched:
        hint = typing.get_args(hint)[0] if len(typing.get_args(hint)) == 1 else Any
    if parameter.default is None and hint is not Any:
        hint = typing.Optional[hint]  # noqa: UP045  (`|` fails on hints that are not types)
    try:
        with computed_fields_optional(hint):  # msgspec caches with a class the information about its fields
            hint = adapt_hint(hint)
            msgspec.json.Decoder(hint, dec_hook=_convert)
    except Exception:  # a hint that msgspec does not support
        return Any
    return hint


def _python_hint(hint: Any) -> Any:
    """Return the hint to check Python values against: plain types and classes with fields, Any for everything else. A
    bool is also a number, as in Python."""
    if hint is int or hint is float:
        return hint | bool
    if hint in _PLAIN or hint in _CONTAINERS or hint is ... or _names_class(hint):
        return hint
    if typing.get_origin(hint) is typing.Annotated:
        inner, *constraints = typing.get_args(hint)
        inner = inner if inner in (int, float) else _python_hint(inner)  # msgspec has no constraints of a union
        return Any if inner is Any else typing.Annotated[(inner, *constraints)]
    origin, args = typing.get_origin(hint), tuple(_python_hint(arg) for arg in typing.get_args(hint))
    if origin in _CONTAINERS:
        return origin[args]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[args]  # noqa: UP007  (`|` of a tuple)
    return Any


def _names_class(hint: Any) -> bool:
    """Return whether `hint` is or contains a class whose instances are checked: a dataclass, an enum and so on."""
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return isinstance(hint, HintAdapter) or native.has_form(hint)
    return any(map(_names_class, typing.get_args(hint)))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return kind in _PLAIN or (kind in _CONTAINERS and all(map(_is_plain, value)))


def _convert_plain(value: Any, hint: Any) -> Any:
    return msgspec.convert(value, hint, builtin_types=BYTES, dec_hook=_convert)


def _convert(hint: Any, value: Any) -> Any:  # noqa: PLR0911  one branch per kind
    """Convert a decoded value for a hint that msgspec does not know. (msgspec's dec_hook: a ValueError rejects.)"""
    kind = typing.get_origin(hint) or hint
    if isinstance(kind, HintAdapter):
        return kind.read(value, _convert)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(kind, type):
        if issubclass(kind, numpy.ndarray):
            return _array(numpy, hint, value)
        if issubclass(kind, numpy.generic):
            return kind(value)
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return model_of(kind, value)
    pathlib = sys.modules.get("pathlib")
    if pathlib is not None and isinstance(kind, type) and issubclass(kind, pathlib.PurePath) and isinstance(value, str):
        return kind(value)
    if kind is complex and isinstance(value, (int, float)):
        return complex(value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value  # an abstract class such as Iterable
    name = getattr(kind, "__qualname__", str(hint))
    raise ValueError(f"Expected {name}, got {type(value).__name__}")


def _array(numpy: Any, hint: Any, value: Any) -> Any:
    if isinstance(value, numpy.ndarray):
        return value
    dtype = None
    for part in typing.get_args(hint):  # ndarray[shape, dtype[float32]]
        if (typing.get_origin(part) or part) is numpy.dtype:
            scalar = (*typing.get_args(part), None)[0]
            dtype = scalar if isinstance(scalar, type) else None
    array = numpy.asarray(value, dtype)
    if array.dtype.hasobject:
        raise ValueError("Expected an array of numbers")
    return array
