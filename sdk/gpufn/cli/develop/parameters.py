"""Options of a command from the JSON Schema of a function's parameters.

A value is text, a number, a flag or JSON, as its schema says; `@FILE` reads it from a file. The gateway checks the
remaining rules of the schema, such as minimum and pattern.
"""

from __future__ import annotations

import base64
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from gpufn.cli.terminal.command import Command
from gpufn_core.spec.function_spec import MethodSpec

_MISSING: Final = object()
_NAMES: Final = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list"}
_EXAMPLES: Final = {"array": "'[1, 2]'", "object": """'{"x": 1}'"""}


class Value(click.ParamType[Any]):
    """A value as its schema describes it."""

    def __init__(self, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> None:
        self._parts = list(_alternatives(schema, definitions))
        self._types = {part.get("type", "any") for part in self._parts}
        self._choices = [value for part in self._parts for value in part.get("enum", ())]
        self.is_bytes = any(part.get("contentEncoding") == "base64" for part in self._parts)
        self.name = self._name()

    @property
    def is_flag(self) -> bool:
        return self._types == {"boolean"}

    def _name(self) -> str:
        if self._choices and self._types <= {"any", "string"}:
            return "|".join(map(str, self._choices))
        if self.is_bytes:
            return "bytes"
        return "|".join(_NAMES.get(each, "json") for each in sorted(self._types - {"null"})) or "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        data = self._read(value, param, ctx)
        if self.is_bytes:
            return base64.b64encode(data).decode()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            self.fail(f"{value} is not text in UTF-8.", param, ctx)
        is_file = value.startswith("@") and not value.startswith("@@")
        parsed = self._parse(text.strip() if is_file and "string" not in self._types else text)
        if parsed is _MISSING:
            self.fail(f"{text[:200]!r} is not {self._expected()}.", param, ctx)
        return parsed

    def _read(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> bytes:
        """Return the bytes of the file or standard input that the value names, or else its own."""
        if not value.startswith("@") or value.startswith("@@"):
            return value.removeprefix("@").encode() if value.startswith("@@") else value.encode()
        if value == "@-":
            return sys.stdin.buffer.read()
        try:
            return Path(value[1:]).read_bytes()
        except OSError as error:
            self.fail(f"cannot read {value[1:]}: {error.strerror}. @@ is for text that starts with @.", param, ctx)

    def _parse(self, text: str) -> Any:
        """Return the value of `text`, or _MISSING if it is of no type that the schema allows."""
        if self._choices:
            return next((each for each in self._choices if each == text or _as_json(each) == text), _MISSING)
        if self._types <= {"string", "null"}:
            return text
        value = _MISSING
        with contextlib.suppress(msgspec.MsgspecError):
            value = msgspec.json.decode(text)
        if value is not _MISSING and self._types & {"any", _type_of(value)}:
            return value
        if isinstance(value, int) and not isinstance(value, bool) and "number" in self._types:
            return float(value)
        return text if self._types & {"any", "string"} else _MISSING

    def _expected(self) -> str:
        if self._choices:
            return f"one of {', '.join(map(str, self._choices))}"
        if self._types <= {"integer", "null"}:
            return "a valid integer"
        if self._types <= {"integer", "number", "null"}:
            return "a valid number"
        example = next((_EXAMPLES[each] for each in sorted(self._types) if each in _EXAMPLES), "")
        return f"valid JSON for {self.name}" + (f", such as {example}" if example else "")


def command_of(usage: str, method: MethodSpec) -> click.Command:
    """Return a command whose options are the parameters of a method. It returns the arguments."""
    schema = method.parameters
    definitions, required = schema.get("$defs", {}), schema.get("required", ())
    options = [
        _option(name, property_, definitions, is_required=name in required)
        for name, property_ in schema.get("properties", {}).items()
    ]
    accepts_others = bool(schema.get("additionalProperties"))
    return Command(
        usage,
        params=[*options],
        callback=click.pass_context(_others if accepts_others else _given),
        help=method.doc or None,
        context_settings={
            "token_normalize_func": lambda token: token.replace("_", "-"),
            "ignore_unknown_options": accepts_others,
            "allow_extra_args": accepts_others,
            "show_default": True,
        },
    )


def arguments_of(usage: str, method: MethodSpec, words: Sequence[str], parent: click.Context | None) -> dict[str, Any]:
    """Return the arguments that the words of a command line give. Raises click.UsageError; exits after `--help`."""
    command = command_of(usage, method)
    with command.make_context(usage, list(words), parent=parent) as context:
        arguments: dict[str, Any] = command.invoke(context)
    return arguments


def _option(name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any], *, is_required: bool) -> click.Option:
    kind = Value(schema, definitions)
    flag = name.replace("_", "-")
    # Only what the user gives is sent: the worker knows the defaults.
    text = schema.get("description", "")
    if "default" in schema:
        text = f"{text}  [default: {_as_json(schema['default'])}]".strip()
    declarations = [f"--{flag}/--no-{flag}" if kind.is_flag else f"--{flag}", name]
    attributes: dict[str, Any] = {"help": text, "required": is_required, "show_default": False}
    if kind.is_flag:
        return click.Option(declarations, is_flag=True, **attributes)
    return click.Option(declarations, type=kind, **attributes)


def _given(context: click.Context, /, **values: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }


def _others(context: click.Context, /, **values: Any) -> dict[str, Any]:
    """Also return options that no parameter has, for **keywords."""
    arguments, words = _given(context, **values), iter(context.args)
    for word in words:
        name, equals, text = word.partition("=")
        if not name.startswith("--"):
            raise click.UsageError(f"Got unexpected extra argument ({word})", context)
        value = text if equals else next(words, None)
        if value is None:
            raise click.UsageError(f"Option {name!r} requires an argument.", context)
        arguments[name[2:].replace("-", "_")] = Value({}, {}).convert(value, None, context)
    return arguments


def _alternatives(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the simple schemas of which a value must fit one."""
    if reference := schema.get("$ref"):
        return _alternatives(definitions.get(str(reference).rpartition("/")[2], {}), definitions)
    if parts := schema.get("anyOf") or schema.get("oneOf"):
        return [each for part in parts for each in _alternatives(part, definitions)]
    if isinstance(kinds := schema.get("type"), list):
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def _type_of(value: Any) -> str:
    kinds: dict[type, str] = {
        bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"
    }  # fmt: skip
    return kinds.get(type(value), "null")


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
