from __future__ import annotations

import itertools
from typing import Any

import pytest

from gpufn_core.errors import InvalidInput
from gpufn_gateway.arguments.allowed_values import allowed_values
from gpufn_gateway.arguments.signature import MAX_CHECKED_BYTES, Signature, depth_of


def of(schema: Any, **root: Any) -> Signature:
    return Signature(
        {
            "type": "object",
            "properties": {"a": schema},
            "required": ["a"],
            "additionalProperties": False,
            **root,
        }
    )


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "good", "bad", "message"),
    [
        ({"type": "string"}, ['"x"'], "1", "a: expected str, got int"),
        ({"type": "integer"}, ["1", "-99999999999999999999"], "1.5", "a: expected int, got float"),
        ({"type": "integer"}, ["0"], "true", "a: expected int, got bool"),
        ({"type": "number"}, ["1", "1.5"], '"1"', "a: expected float, got str"),
        ({"type": "boolean"}, ["true"], "1", "a: expected bool, got int"),
        ({"type": "null"}, ["null"], "1", "a: expected null, got int"),
        ({"type": "array", "items": {"type": "string"}}, ["[]", '["x"]'], "[null]", "a[0]: expected str, got null"),
        ({"type": ["string", "null"]}, ["null", '"x"'], "1", "a: expected str | null, got int"),
        (
            {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            ["1", '"x"'],
            "[]",
            "a: expected int | str, got array",
        ),
        ({"enum": ["x", "y"]}, ['"x"'], '"z"', 'a: invalid enum value \'z\'; it takes "x", "y"'),
        ({"enum": [1, "x", None]}, ["1", '"x"', "null"], "2", 'a: invalid enum value 2; it takes 1, "x", null'),
        ({"const": "x"}, ['"x"'], '"y"', "a: invalid enum value 'y'; it takes \"x\""),
        ({"type": "integer", "minimum": 1, "maximum": 5}, ["1", "5"], "6", "a: expected int <= 5"),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.1"], "0", "a: expected float > 0.0"),
        ({"type": "string", "maxLength": 2}, ['"xx"'], '"xxx"', "a: expected str of length <= 2"),
        ({"type": "array", "minItems": 1}, ["[1]"], "[]", "a: expected array of length >= 1"),
        (
            {
                "type": "array",
                "prefixItems": [{"type": "integer"}, {"type": "string"}],
                "minItems": 2,
                "maxItems": 2,
                "items": False,
            },
            ['[1,"x"]'],
            "[1,2]",
            "a[1]: expected str, got int",
        ),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            ["{}", '{"k":1}'],
            '{"k":"v"}',
            "a[...]: expected int, got str",
        ),
        (POINT, ['{"x":1}'], '{"x":"1"}', "a.x: expected int, got str"),
        (POINT, ['{"x":1}'], "{}", "a.x: this argument is missing"),
        (POINT, ['{"x":1}'], '{"x":1,"y":2}', "a.y: there is no such argument"),
    ],
)
def test_each_keyword_is_checked(schema: Any, good: list[str], bad: str, message: str) -> None:
    signature = of(schema)
    for value in good:
        signature.check(f'{{"a":{value}}}'.encode())
    with pytest.raises(InvalidInput) as caught:
        signature.check(f'{{"a":{bad}}}'.encode())
    assert (caught.value.message, caught.value.field) == (message, message.partition(":")[0])


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "string", "format": "decimal"},
        {"type": "nonsense"},
        {"type": "string", "pattern": "(a+)+$"},
        {"not": {"type": "string"}},
        {"anyOf": [{"type": "array"}, {"type": "array", "items": {"type": "string"}}, {"type": "string"}]},
        {"anyOf": [POINT, {**POINT, "title": "other"}]},
        {"enum": [1.5, "x"]},
        {"enum": []},
        {"$ref": "#/$defs/Missing"},
        {"$ref": "https://example.org/schema"},
        {"type": "integer", "minimum": "x"},
        {"type": "string", "minLength": -1},
    ],
)
def test_schemas_that_the_gateway_cannot_check_are_left_to_the_worker(schema: Any) -> None:
    of(schema).check(b'{"a":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}')


COLOR = {"enum": ["red", "green"]}
INSIDE = {
    "$defs": {"Color": COLOR, "Node": {"type": "object", "properties": {"color": {"$ref": "#/$defs/Color"}}}},
}


@pytest.mark.parametrize(
    ("schema", "bad", "path"),
    [
        ({"$ref": "#/$defs/Color"}, '"blue"', "a"),
        ({"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]}, '"blue"', "a"),
        ({"$ref": "#/$defs/Node"}, '{"color":"blue"}', "a.color"),
        ({"type": "array", "items": {"$ref": "#/$defs/Node"}}, '[{},{"color":"blue"}]', "a[1].color"),
        ({"type": "object", "additionalProperties": COLOR}, '{"k":"blue"}', "a[...]"),
        (
            {"type": "array", "prefixItems": [{}, COLOR], "items": False, "minItems": 2, "maxItems": 2},
            '[1,"blue"]',
            "a[1]",
        ),
    ],
)
def test_an_enum_lists_its_values_at_any_place(schema: Any, bad: str, path: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        of(schema, **INSIDE).check(f'{{"a":{bad}}}'.encode())
    assert caught.value.message.startswith(f"{path}: ")
    assert all(value in caught.value.message for value in ("'blue'", '"red", "green"'))
    assert caught.value.field == path


def test_the_error_of_a_long_enum_lists_its_first_values() -> None:
    with pytest.raises(InvalidInput) as caught:
        of({"enum": [f"v{number}" for number in range(1000)]}).check(b'{"a":"z"}')
    assert caught.value.message.endswith('; it takes "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", ...')


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"anyOf": [{"$ref": "#/$defs/Loop"}, COLOR]}, '"red", "green"'),
        ({"$ref": "#/$defs/Missing"}, ""),
        ({"$ref": 1}, ""),
        ({"enum": 7}, ""),
        ({"anyOf": 7}, ""),
        ({"enum": ["x" * 1000]}, ""),
    ],
)
def test_an_invalid_or_circular_schema_blocks_no_calls(schema: Any, told: str) -> None:
    root = {"properties": {"a": schema}, "$defs": {"Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 2}}}
    assert allowed_values(root, "a") == told


def test_references_are_followed_and_may_go_in_circles() -> None:
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}}}
    signature = of({"$ref": "#/$defs/Tree"}, **{"$defs": {"Tree": tree}})
    signature.check(b'{"a":{"kids":[{"kids":[]}]}}')
    with pytest.raises(InvalidInput, match=r"a\.kids: expected array"):
        signature.check(b'{"a":{"kids":1}}')


def test_references_that_fan_out_are_built_once_each() -> None:
    names = [f"D{number}" for number in range(40)]
    definitions: dict[str, Any] = {
        name: {"type": "object", "properties": {"l": {"$ref": f"#/$defs/{below}"}, "r": {"$ref": f"#/$defs/{below}"}}}
        for name, below in itertools.pairwise(names)
    }
    definitions[names[-1]] = {"type": "integer"}
    of({"$ref": "#/$defs/D0"}, **{"$defs": definitions}).check(b'{"a":{"l":{}}}')


def test_arguments_with_any_name_and_further_keywords() -> None:
    signature = Signature({"properties": {"class": {"type": "integer"}, "x-y": {"type": "string"}}, "type": "object"})
    signature.check(b'{"class":1,"x-y":"z","more":[1]}')
    with pytest.raises(InvalidInput, match="class: expected int"):
        signature.check(b'{"class":"1"}')


def test_a_function_without_arguments() -> None:
    signature = Signature({"type": "object", "properties": {}, "additionalProperties": False})
    signature.check(b"{}")
    signature.check(b" { } ")
    with pytest.raises(InvalidInput, match=r"^x: .* no arguments$"):
        signature.check(b'{"x":1}')


@pytest.mark.parametrize("body", [b"", b"{", b"nul", b'{"a":1}{', b'{"a":01}', b'"\xff"'])
def test_invalid_json_is_reported_with_its_position(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        Signature({}).check(body)


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b"1", 0),
        (b"{}", 1),
        (b'{"a":[{"b":[]}]}', 4),
        (b'["[[[[","\\"[[["]', 1),
        (b"[" * 64 + b"]" * 64, 64),
        (b"[" * 500 + b"]" * 500, 65),
        (b"[" + b"{}," * 9999 + b"{}]", 2),
    ],
)
def test_depth_is_counted_outside_of_strings(body: bytes, depth: int) -> None:
    assert depth_of(body) == depth


def test_a_hostile_body_is_refused_in_linear_time() -> None:
    for body in (b'"' + b'\\"' * 400_000, b"[" * 900_000, b'{"a":"' + b"\\" * 900_000, b'{"a":' * 100_000):
        with pytest.raises(InvalidInput):
            Signature({}).check(body)


@pytest.mark.parametrize("schema", [{"properties": 5}, {"properties": "x"}, {"type": "object", "required": 5}])
def test_a_schema_that_is_none_checks_nothing(schema: Any) -> None:
    Signature(schema).check(b'{"a":1}')


def test_large_bodies_are_left_to_the_worker() -> None:
    of({"type": "integer"}).check(b'{"a":"' + b"x" * MAX_CHECKED_BYTES + b'"}')


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"a": "x", "b": 1}', "b: expected str, got int"),
        (b'{"a": "x", "b c": [1]}', "b c: expected str, got array"),
    ],
)
def test_of_keywords_of_any_name_the_wrong_one_is_named(body: bytes, said: str) -> None:
    signature = Signature({"type": "object", "properties": {}, "additionalProperties": {"type": "string"}})
    with pytest.raises(InvalidInput) as raised:
        signature.check(body)
    assert (raised.value.message, raised.value.field) == (said, said.partition(":")[0])
    nested = {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}}
    with pytest.raises(InvalidInput) as raised:
        Signature(nested).check(b'{"a": [1], "b": [1, "2"]}')
    assert (raised.value.field, raised.value.message.partition(" ")[0]) == ("b[1]", "b[1]:")
    with pytest.raises(InvalidInput) as raised:
        Signature({"type": "object", "additionalProperties": COLOR}).check(b'{"a": "red", "b": "blue"}')
    assert raised.value.field == "b"
    assert raised.value.message.endswith('"red", "green"')
