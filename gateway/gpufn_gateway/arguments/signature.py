"""A method's JSON Schema as a msgspec decoder, to check JSON arguments at C speed before they are queued.

1. `Signature(schema)` converts the schema to msgspec types. Unsupported parts become Any: the worker checks again with
   the function's real type hints, so this check may accept too much but must never reject a valid call.
2. `check(body)` decodes, and converts msgspec's message to a path and a reason: ``texts[0]: expected str, got int``.

Only the worker checks bodies above `MAX_CHECKED_BYTES`: they would block the gateway's event loop for too long.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal, Union

import msgspec

from gpufn_core.encoding.msgspec_errors import describe_json_error, number_field, parse_validation_error
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.function_spec import MethodSpec
from gpufn_gateway.arguments.allowed_values import allowed_values

MAX_CHECKED_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64

_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_BRACES_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_MAX_TRIES: Final = 1000
_ANY_KEY = "[...]"  # msgspec's path for any value of a dict
_SIMPLE: Mapping[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": None}
_BOUNDS = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}
_LENGTHS = {"minLength": "min_length", "maxLength": "max_length"}
_COUNTS = {"minItems": "min_length", "maxItems": "max_length"}


_JSON_HINT = 'send an object with the arguments, such as {"name": "value"}'
_BYTES_HINT = "to send raw bytes, add -H 'Content-Type: application/octet-stream'"


class Signature:
    """Checks the keyword arguments of one method. `schema` is `MethodSpec.parameters`.

    `raw_parameter` is the parameter that takes a raw body, if there is one. It is used for error hints: a body that is
    not valid JSON may have been meant as raw bytes.
    """

    def __init__(self, schema: Mapping[str, Any], *, raw_parameter: str | None = None) -> None:
        self._hint = _JSON_HINT if raw_parameter is None else _BYTES_HINT
        declared = schema.get("properties")
        properties: Mapping[str, Any] = declared if isinstance(declared, Mapping) else {}
        self.names: tuple[str, ...] = tuple(properties)
        self.bytes_names = frozenset(
            name for name, member in properties.items() if name == raw_parameter or _takes_bytes(member)
        )
        self._schema = schema
        self._decode = _decoder(schema).decode
        self._takes_nothing_required = not schema.get("required")
        self._decoder_by_name: dict[str, msgspec.json.Decoder[Any]] = {}

    @classmethod
    def of(cls, method: MethodSpec) -> Signature:
        return cls(method.parameters, raw_parameter=method.raw_parameter)

    def check(self, body: bytes) -> None:
        """Check a JSON body. Raises InvalidInput with the field."""
        if len(body) > MAX_CHECKED_BYTES or (body == b"{}" and self._takes_nothing_required):
            return
        try:
            self._decode(body)
        except msgspec.ValidationError as error:
            raise self._explain(str(error), body) from None
        except RecursionError:
            raise _too_deep() from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if field := number_field(body):
                raise InvalidInput(f"{field}: {describe_json_error(error, body)}", field=field) from None
            raise InvalidInput(
                f"the body is not valid JSON: {describe_json_error(error, body)}; {self._hint}"
            ) from None
        if body.count(b"[") + body.count(b"{") > MAX_DEPTH and depth_of(body) > MAX_DEPTH:
            raise _too_deep()

    def check_without_bytes(self, body: bytes) -> None:
        """Like `check`, for a body in which a placeholder replaces each bytes argument."""
        self._without_bytes.check(body)

    @functools.cached_property
    def _without_bytes(self) -> Signature:
        properties = {**self._schema.get("properties", {}), **dict.fromkeys(self.bytes_names, True)}
        return Signature({**self._schema, "properties": properties})

    def takes(self, name: str) -> bool:
        """True if an argument with this name is allowed."""
        return name in self.names or self._schema.get("additionalProperties", True) is not False

    def fits(self, name: str, value: Any) -> bool:
        """True if `value`, encoded as JSON, is valid for the argument `name`."""
        decoder = self._decoder_by_name.get(name)
        if decoder is None:
            declared = name in self.names
            schema = self._schema["properties"][name] if declared else self._schema.get("additionalProperties", True)
            decoder = msgspec.json.Decoder(_Types(self._schema).of(schema))
            if declared:
                self._decoder_by_name[name] = decoder
        try:
            decoder.decode(msgspec.json.encode(value))
        except (msgspec.DecodeError, RecursionError):
            return False
        return True

    def _explain(self, error_text: str, body: bytes) -> InvalidInput:
        error = parse_validation_error(error_text)
        path = error.path
        if error.is_missing:
            return InvalidInput(f"{path}: this argument is missing", field=path)
        if error.is_unknown:
            takes = "" if error.at else f"; it takes {', '.join(self.names) or 'no arguments'}"
            return InvalidInput(f"{path}: there is no such argument{takes}", field=path)
        if not path:
            return InvalidInput(f"the body must be a JSON object of keyword arguments: {error.text}")
        values = allowed_values(self._schema, path) if "enum value" in error.text else ""
        takes = f"; it takes {values}" if values else ""
        if path.startswith(_ANY_KEY):
            path = self._wrong_keyword(body) + path.removeprefix(_ANY_KEY)
        return InvalidInput(f"{path}: {error.text}{takes}", field=path)

    def _wrong_keyword(self, body: bytes) -> str:
        """Find the invalid keyword of a function with **kwargs, since msgspec does not name it.

        It tries only the first keywords, so that the search does not block the event loop.
        """
        keywords = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for name, value in itertools.islice(keywords.items(), _MAX_TRIES):
            try:
                self._decode(msgspec.json.encode({name: value}))
            except msgspec.ValidationError:
                return name
        return _ANY_KEY


def _takes_bytes(schema: Any) -> bool:
    """True if the schema accepts bytes, alone or among other types."""
    if not isinstance(schema, Mapping):
        return False
    members = [member for union in ("anyOf", "oneOf") for member in schema.get(union) or ()]
    return schema.get("contentEncoding") == "base64" or any(_takes_bytes(member) for member in members)


def depth_of(body: bytes) -> int:
    """Return the nesting depth of valid JSON, at most MAX_DEPTH + 1."""
    brackets = _STRINGS.sub(b"", body).translate(_BRACES_AS_BRACKETS, _ALL_BUT_BRACKETS)
    depth = 0
    # Each round removes the innermost pairs.
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
    """Convert schema nodes to msgspec types. `$ref`s are resolved in the root; a recursive one becomes Any."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._expanding: set[str] = set()
        self._resolved: dict[str, Any] = {}

    def of(self, schema: Any) -> Any:
        """Return the type for a node; Any if there is none or msgspec does not support it."""
        if not isinstance(schema, Mapping):
            return Any
        try:
            built = self._build(schema)
            msgspec.json.Decoder(built)  # msgspec rejects some unions and bounds only here
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
                return self._union(self.of(member) for member in schema[union])
        kind = schema.get("type")
        if isinstance(kind, list):
            return self._union(self.of({**schema, "type": member}) for member in kind)
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if isinstance(kind, str) and kind in _SIMPLE and schema.get("format") != "decimal":
            return _bounded(_SIMPLE[kind], schema, _BOUNDS if kind in ("integer", "number") else _LENGTHS)
        return Any

    def _reference(self, reference: str) -> Any:
        if reference in self._resolved:
            return self._resolved[reference]
        if reference in self._expanding or not reference.startswith("#/"):
            return Any
        node: Any = self._root
        for part in reference[2:].split("/"):
            node = node[part]
        self._expanding.add(reference)
        try:
            built = self._resolved[reference] = self.of(node)
        finally:
            self._expanding.discard(reference)
        return built

    def _union(self, members: Iterable[Any]) -> Any:
        types = tuple(members)
        return Any if Any in types else Union[types]  # noqa: UP007

    def _object(self, schema: Mapping[str, Any]) -> Any:
        properties: Mapping[str, Any] = schema.get("properties") or {}
        additional = schema.get("additionalProperties", True)
        if not properties and additional is not False:
            return dict[str, self.of(additional)]  # type: ignore[misc]
        required = set(schema.get("required") or ())
        fields: list[tuple[str, Any, Any]] = []
        names: dict[str, str] = {}
        for number, (name, property_schema) in enumerate(properties.items()):
            kind = self.of(property_schema)
            names[f"f{number}"] = name
            fields.append((f"f{number}", kind, msgspec.NODEFAULT if name in required else None))
        return msgspec.defstruct(
            "Arguments", fields, kw_only=True, rename=names, forbid_unknown_fields=additional is False, gc=False
        )

    def _array(self, schema: Mapping[str, Any]) -> Any:
        prefix_items = schema.get("prefixItems")
        if prefix_items:
            if schema.get("items") is False and schema.get("minItems") == len(prefix_items) == schema.get("maxItems"):
                return tuple[tuple(self.of(head) for head in prefix_items)]  # type: ignore[misc]
            return list[Any]
        item = schema.get("items", True)
        return _bounded(list[self.of(item)], schema, _COUNTS)  # type: ignore[misc]


def _bounded(kind: Any, schema: Mapping[str, Any], keywords: Mapping[str, str]) -> Any:
    """Add the bounds of a schema to a type, except `pattern`: a slow one in the worker blocks only its own function."""
    bounds = {target: schema[keyword] for keyword, target in keywords.items() if keyword in schema}
    return Annotated[kind, msgspec.Meta(**bounds)] if bounds and kind is not None and kind is not bool else kind
