"""A method's JSON Schema as a msgspec decoder: JSON arguments are checked at C speed before they are queued.

1. `Signature(schema)` turns the schema into msgspec types. What it does not know becomes Any: the worker checks again,
   with the function's real type hints, so this may let through too much but must never refuse too much.
2. `check(body)` decodes, and turns msgspec's words into a path and a reason: ``texts[0]: expected str, got int``.

Bodies above `LARGEST_CHECKED` are left to the worker: the gateway's loop serves everybody and must not be held up.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, Union

import msgspec

from gpufn_core.encoding.msgspec_errors import json_fault, misfit, number_field
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.arguments.enum_messages import told_values

LARGEST_CHECKED: Final = 1 << 20
MAX_DEPTH: Final = 64

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACES_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_MOST_TRIED: Final = 1000
_OF_ANY_NAME = "[...]"  # msgspec's path to a value of a dict
_SIMPLE: Mapping[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": None}
_BOUNDS = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}
_LENGTHS = {"minLength": "min_length", "maxLength": "max_length"}
_COUNTS = {"minItems": "min_length", "maxItems": "max_length"}


_JSON_HINT = 'it is an object with the arguments, such as {"name": "value"}'
_BYTES_HINT = "to send bytes as they are add -H 'Content-Type: application/octet-stream'"


class Signature:
    """Checks the keyword arguments of one method. `schema` is `MethodSpec.parameters`.

    `raw_parameter` is the parameter that takes a raw body, if there is one. A body that is not valid JSON may have been
    meant as one.
    """

    def __init__(self, schema: Mapping[str, Any], *, raw_parameter: str | None = None) -> None:
        self._hint = _JSON_HINT if raw_parameter is None else _BYTES_HINT
        known = schema.get("properties")
        properties: Mapping[str, Any] = known if isinstance(known, Mapping) else {}
        self.names: tuple[str, ...] = tuple(properties)
        self.bytes_names = frozenset(
            name for name, each in properties.items() if name == raw_parameter or _takes_bytes(each)
        )
        self._schema = schema
        self._decode = _decoder(schema).decode
        self._takes_nothing_required = not schema.get("required")
        self._of_names: dict[str, msgspec.json.Decoder[Any]] = {}

    @classmethod
    def of(cls, method: MethodSpec) -> Signature:
        return cls(method.parameters, raw_parameter=method.raw_parameter)

    def check(self, body: bytes) -> None:
        """Raises InvalidInput with the field."""
        if len(body) > LARGEST_CHECKED or (body == b"{}" and self._takes_nothing_required):
            return
        try:
            self._decode(body)
        except msgspec.ValidationError as error:
            raise self._explain(str(error), body) from None
        except RecursionError:
            raise _too_deep() from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if field := number_field(body):
                raise InvalidInput(f"{field}: {json_fault(error, body)}", field=field) from None
            raise InvalidInput(f"the body is not valid JSON: {json_fault(error, body)}; {self._hint}") from None
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH and depth_of(body) > MAX_DEPTH:
            raise _too_deep()

    def check_beside_bytes(self, body: bytes) -> None:
        """`check`, where each argument of bytes has a placeholder: any value fits it."""
        self._beside_bytes.check(body)

    @functools.cached_property
    def _beside_bytes(self) -> Signature:
        properties = {**self._schema.get("properties", {}), **dict.fromkeys(self.bytes_names, True)}
        return Signature({**self._schema, "properties": properties})

    def takes(self, name: str) -> bool:
        """True when there may be an argument of this name."""
        return name in self.names or self._schema.get("additionalProperties", True) is not False

    def fits(self, name: str, value: Any) -> bool:
        """True when `value`, as JSON, may be the argument `name`."""
        decoder = self._of_names.get(name)
        if decoder is None:
            known = name in self.names
            schema = self._schema["properties"][name] if known else self._schema.get("additionalProperties", True)
            decoder = msgspec.json.Decoder(_Types(self._schema).of(schema))
            if known:
                self._of_names[name] = decoder
        try:
            decoder.decode(msgspec.json.encode(value))
        except (msgspec.DecodeError, RecursionError):
            return False
        return True

    def _explain(self, trouble: str, body: bytes) -> InvalidInput:
        found = misfit(trouble)
        path = found.path
        if found.is_missing:
            return InvalidInput(f"{path}: this argument is missing", field=path)
        if found.is_unknown:
            takes = "" if found.at else f"; it takes {', '.join(self.names) or 'no arguments'}"
            return InvalidInput(f"{path}: there is no such argument{takes}", field=path)
        if not path:
            return InvalidInput(f"the body must be a JSON object of keyword arguments: {found.text}")
        values = told_values(self._schema, path) if "enum value" in found.text else ""
        takes = f"; it takes {values}" if values else ""
        if path.startswith(_OF_ANY_NAME):
            path = self._wrong_keyword(body) + path.removeprefix(_OF_ANY_NAME)
        return InvalidInput(f"{path}: {found.text}{takes}", field=path)

    def _wrong_keyword(self, body: bytes) -> str:
        """Of a function that takes any: msgspec does not say which. Among so many that it holds nobody up."""
        keywords = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name, value in itertools.islice(keywords.items(), _MOST_TRIED):
            try:
                self._decode(msgspec.json.encode({name: value}))
            except msgspec.ValidationError:
                return name
        return _OF_ANY_NAME


def _takes_bytes(schema: Any) -> bool:
    """True for the schema of a parameter that takes bytes, or bytes among other types."""
    if not isinstance(schema, Mapping):
        return False
    members = [each for union in ("anyOf", "oneOf") for each in schema.get(union) or ()]
    return schema.get("contentEncoding") == "base64" or any(_takes_bytes(each) for each in members)


def depth_of(body: bytes) -> int:
    """How deep valid JSON nests, up to one more than MAX_DEPTH."""
    brackets = _STRINGS.sub(b"", body).translate(_BRACES_AS_BRACKETS, _ALL_BUT_BRACKETS)
    depth = 0
    # Each round takes the innermost pairs away.
    while brackets and depth <= MAX_DEPTH:
        brackets = brackets.replace(b"[]", b"")
        depth += 1
    return depth


def _too_deep() -> InvalidInput:
    return InvalidInput(f"the body is nested more than {MAX_DEPTH} levels deep")


def _decoder(schema: Mapping[str, Any]) -> msgspec.json.Decoder[Any]:
    built = _Types(schema).of(schema)
    return msgspec.json.Decoder(dict[str, Any] if built is Any else built)


class _Types:
    """Schema nodes to msgspec types. `$ref`s are looked up in the root; one that contains itself becomes Any."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._open: set[str] = set()
        self._referenced: dict[str, Any] = {}

    def of(self, schema: Any) -> Any:
        """The type for a node; Any when there is none, or none that msgspec takes."""
        if not isinstance(schema, Mapping):
            return Any
        try:
            built = self._build(schema)
            msgspec.json.Decoder(built)  # msgspec refuses some unions and bounds only here
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
            return Any
        return built

    def _build(self, schema: Mapping[str, Any]) -> Any:  # noqa: PLR0911  one line per keyword
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "const" in schema:
            return Literal[schema["const"]]
        if "enum" in schema:
            return Literal[tuple(schema["enum"])]
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self._union(self.of(each) for each in schema[union])
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._union(self.of({**schema, "type": each}) for each in kind)
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if isinstance(kind, str) and kind in _SIMPLE and schema.get("format") != "decimal":
            return _bounded(_SIMPLE[kind], schema, _BOUNDS if kind in ("integer", "number") else _LENGTHS)
        return Any

    def _reference(self, reference: str) -> Any:
        if reference in self._referenced:
            return self._referenced[reference]
        if reference in self._open or not reference.startswith("#/"):
            return Any
        node: Any = self._root
        for part in reference[2:].split("/"):
            node = node[part]
        self._open.add(reference)
        try:
            built = self._referenced[reference] = self.of(node)
        finally:
            self._open.discard(reference)
        return built

    def _union(self, members: Iterable[Any]) -> Any:
        types = tuple(members)
        return Any if Any in types else Union[types]  # noqa: UP007

    def _object(self, schema: Mapping[str, Any]) -> Any:
        properties: Mapping[str, Any] = schema.get("properties") or {}
        others = schema.get("additionalProperties", True)
        if not properties and others is not False:
            return dict[str, self.of(others)]  # type: ignore[misc]
        required = set(schema.get("required") or ())
        fields: list[tuple[str, Any, Any]] = []
        names: dict[str, str] = {}
        for number, (name, property_schema) in enumerate(properties.items()):
            kind = self.of(property_schema)
            names[f"f{number}"] = name
            fields.append((f"f{number}", kind, msgspec.NODEFAULT if name in required else None))
        return msgspec.defstruct(
            "Arguments", fields, kw_only=True, rename=names, forbid_unknown_fields=others is False, gc=False
        )

    def _array(self, schema: Mapping[str, Any]) -> Any:
        heads = schema.get("prefixItems")
        if heads:
            if schema.get("items") is False and schema.get("minItems") == len(heads) == schema.get("maxItems"):
                return tuple[tuple(self.of(head) for head in heads)]  # type: ignore[misc]
            return list[Any]
        item = schema.get("items", True)
        return _bounded(list[self.of(item)], schema, _COUNTS)  # type: ignore[misc]


def _bounded(kind: Any, schema: Mapping[str, Any], known: Mapping[str, str]) -> Any:
    """`pattern` is left to the worker: a slow expression there holds up its own function only."""
    bounds = {ours: schema[theirs] for theirs, ours in known.items() if theirs in schema}
    return Annotated[kind, msgspec.Meta(**bounds)] if bounds and kind is not None and kind is not bool else kind
