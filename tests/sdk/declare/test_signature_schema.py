from __future__ import annotations

import contextlib
import dataclasses
import enum
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from gpufn.declare.hints import signature_schema
from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.function_spec import Batch, MethodSpec

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]


class Box(msgspec.Struct):
    x: int
    y: int = 0


@dataclasses.dataclass
class Label:
    name: str
    box: Box


class Colour(enum.Enum):
    RED = "red"


def _of(function: Callable[..., Any], batch: Batch | None = None) -> MethodSpec:
    (spec,) = signature_schema.methods_of(function, batch)
    return spec


def test_the_schema_of_a_path_is_a_string() -> None:
    def f(path: pathlib.Path, others: list[pathlib.PurePath] | None = None) -> pathlib.Path:
        return path

    spec = _of(f)
    assert spec.parameters["properties"]["path"] == {"type": "string", "format": "path"}
    others = {"type": "array", "items": {"type": "string", "format": "path"}}
    assert spec.parameters["properties"]["others"] == {"anyOf": [others, {"type": "null"}], "default": None}
    assert spec.returns == {"type": "string", "format": "path"}


def test_names_defaults_and_types_become_json_schema() -> None:
    def f(x: int, y: str = "a", *, z: float | None = None, colour: Colour = Colour.RED) -> list[int]:
        """What it does."""
        return []

    spec = _of(f)
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "y": {"type": "string", "default": "a"},
            "z": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
            "colour": {"$ref": "#/$defs/Colour", "default": "red"},
        },
        "additionalProperties": False,
        "required": ["x"],
        "$defs": {"Colour": {"title": "Colour", "enum": ["red"]}},
    }
    assert (spec.returns, spec.doc) == ({"type": "array", "items": {"type": "integer"}}, "What it does.")


def test_named_types_are_defined_once_with_their_parts() -> None:
    def f(labels: list[Label], box: Box) -> Label: ...  # type: ignore[empty-body]

    spec = _of(f)
    assert sorted(spec.parameters["$defs"]) == ["Box", "Label"]
    assert spec.parameters["properties"]["labels"] == {"type": "array", "items": {"$ref": "#/$defs/Label"}}
    assert sorted(spec.returns["$defs"]) == ["Box", "Label"]


@contextlib.contextmanager
def timed() -> Iterator[None]:
    yield


def test_hints_are_resolved_in_the_module_of_the_wrapped_function() -> None:
    @timed()  # wraps `f` in a function of contextlib
    def f(box: Box) -> Label: ...  # type: ignore[empty-body]

    spec = _of(f)
    assert spec.parameters["properties"] == {"box": {"$ref": "#/$defs/Box"}}
    assert spec.returns["$ref"] == "#/$defs/Label"


@dataclasses.dataclass
class Rectangle:
    width: int
    area: int = dataclasses.field(init=False)


def test_a_field_that_a_dataclass_computes_is_not_required() -> None:
    def f(many: dict[str, list[Rectangle]]) -> Rectangle: ...  # type: ignore[empty-body]

    spec = _of(f)
    integer = {"type": "integer"}
    assert spec.parameters["$defs"] == {
        "Rectangle": {
            "title": "Rectangle", "type": "object", "properties": {"width": integer, "area": integer},
            "required": ["width"],
        }
    }  # fmt: skip
    assert spec.returns["$defs"] == spec.parameters["$defs"]


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Modes(enum.IntFlag):
    FAST = 4


@dataclasses.dataclass
class Request:
    access: Access = Access.READ | Access.WRITE
    modes: list[Modes] | None = None


def test_the_schema_of_flags_is_an_integer() -> None:
    def f(request: Request, access: Access = Access.READ) -> Colour: ...  # type: ignore[empty-body]

    spec = _of(f)
    assert spec.parameters["properties"]["access"] == {"$ref": "#/$defs/Access", "default": 1}
    assert spec.parameters["$defs"]["Request"]["properties"]["access"] == {"$ref": "#/$defs/Access", "default": 3}
    assert (spec.parameters["$defs"]["Access"], spec.parameters["$defs"]["Modes"], spec.returns["$defs"]) == (
        {"title": "Access", "type": "integer", "description": "a sum of 1 (READ), 2 (WRITE)"},
        {"title": "Modes", "type": "integer", "description": "a sum of 4 (FAST)"},
        {"Colour": {"title": "Colour", "enum": ["red"]}},
    )


def test_an_array_has_its_datatype() -> None:
    def f(x: npt.NDArray[np.float32], y: np.ndarray | None = None) -> npt.NDArray[np.uint8]:
        raise NotImplementedError

    spec = _of(f)
    assert spec.parameters["properties"] == {"x": {"x-tensor": "FP32"}, "y": {"x-tensor": "", "default": None}}
    assert spec.returns == {"x-tensor": "UINT8"}


@pytest.mark.parametrize("annotation", [object, Callable[[int], int], "Unknown"])
def test_a_hint_that_json_schema_cannot_express_allows_any_value(annotation: Any) -> None:
    def f(x):  # type: ignore[no-untyped-def]
        return x

    f.__annotations__ = {"x": annotation}
    assert _of(f).parameters["properties"] == {"x": {}}


def test_a_name_for_type_checkers_only_does_not_break_other_hints() -> None:
    def f(x: Unknown, y: int) -> Unknown: ...

    spec = _of(f)
    assert (spec.parameters["properties"], spec.returns) == ({"x": {}, "y": {"type": "integer"}}, {})


def test_an_unannotated_parameter_accepts_any_value() -> None:
    def f(x, y=1):  # type: ignore[no-untyped-def]
        return x

    assert _of(f).parameters["properties"] == {"x": {}, "y": {"default": 1}}


def test_a_default_of_none_allows_null() -> None:
    def f(x: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    assert _of(f).parameters["properties"]["x"] == {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}


def test_a_default_that_cannot_be_encoded_is_left_out() -> None:
    def f(x: float = float("nan"), y: Any = object(), z: int = 1 << 64) -> None: ...  # noqa: B008

    assert _of(f).parameters["properties"] == {"x": {"type": "number"}, "y": {}, "z": {"type": "integer"}}


@pytest.mark.parametrize(("annotation", "allowed"), [("Any", True), ("int", {"type": "integer"})])
def test_keywords_allow_further_properties(annotation: str, allowed: Any) -> None:
    def f(**rest: Any) -> None: ...

    f.__annotations__["rest"] = annotation
    assert _of(f).parameters["additionalProperties"] == allowed


def test_pydantic_models_bring_their_own_schema() -> None:
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", a=(int, ...))
    outer = pydantic.create_model("Outer", inner=(inner, ...), limit=(Annotated[int, pydantic.Field(gt=0)], 3))

    def f(x):  # type: ignore[no-untyped-def]
        return x

    f.__annotations__ = {"x": outer}
    spec = _of(f).parameters
    assert spec["$defs"]["Inner"]["properties"]["a"]["type"] == "integer"
    assert spec["properties"]["x"]["properties"]["limit"]["exclusiveMinimum"] == 0


def _only(image: bytes) -> None: ...
def _only_required(image: bytes, mask: bytes | None = None) -> None: ...
def _first(name: str, mask: bytes, image: bytes) -> None: ...
def _optional(name: str, image: bytes = b"") -> None: ...
def _none(name: str) -> None: ...
def _batched(image: list[bytes]) -> None: ...


@pytest.mark.parametrize(
    ("function", "batch", "name"),
    [
        (_only, None, "image"),
        (_only_required, None, "image"),
        (_first, None, "mask"),
        (_optional, None, "image"),
        (_none, None, None),
        (_batched, None, None),
        (_batched, Batch(2), "image"),
    ],
)
def test_raw_bodies_go_to_the_parameter_of_bytes(
    function: Callable[..., Any], batch: Batch | None, name: str | None
) -> None:
    assert _of(function, batch).raw_parameter == name


def test_with_batch_one_call_sends_and_receives_an_element() -> None:
    def f(x: list[int], kind: list[Literal["a", "b"]], free) -> list[Box]: ...  # type: ignore[no-untyped-def,empty-body]

    spec = _of(f, Batch(4))
    assert spec.parameters["properties"] == {"x": {"type": "integer"}, "kind": {"enum": ["a", "b"]}, "free": {}}
    assert spec.returns["$ref"] == "#/$defs/Box"


def test_with_batch_a_default_is_that_of_one_call() -> None:
    def f(x: list[int], top: list[int] = [5], kind: Sequence[str] = ("a",), lang: list[str | None] = [None]) -> Any: ...  # noqa: B006

    spec = _of(f, Batch(4))
    assert {name: schema.get("default", "none") for name, schema in spec.parameters["properties"].items()} == {
        "x": "none", "top": 5, "kind": "a", "lang": None,
    }  # fmt: skip
    assert spec.parameters["required"] == ["x"]


def _no_list(image: bytes) -> None: ...
def _default(x: list[int], top: list[int] = 5) -> None: ...  # type: ignore[assignment]
def _defaults(x: list[int], top: list[int] = [5, 6]) -> None: ...  # noqa: B006
def _keywords(x: list[int], **rest: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_no_list, "image is a list with one value per call: write list[bytes]"),
        (_default, "top is a list with one value per call, so its default is a list"),
        (_defaults, "top is a list with one value per call, so its default is a list"),
        (_keywords, "rest is a list with one value per call"),
    ],
)
def test_with_batch_every_parameter_is_a_list(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        _of(function, Batch(4))
    assert message in str(caught.value)


def test_a_generator_returns_the_list_of_its_items() -> None:
    def f() -> Iterator[int]:
        yield 1

    assert _of(f).returns == {"type": "array", "items": {"type": "integer"}}


class Pace(enum.Enum):
    SLOW = 0.5
    FAST = 2


@dataclasses.dataclass
class Scaled:
    width: int
    scale: dataclasses.InitVar[int] = 1
    area: int = dataclasses.field(init=False)

    def __post_init__(self, scale: int) -> None:
        self.area = self.width * scale


def test_the_schema_of_an_enum_lists_its_values() -> None:
    def f(pace: Pace, paces: list[Pace] | None = None) -> Pace: ...  # type: ignore[empty-body]

    spec = _of(f)
    assert spec.parameters["properties"] == {
        "pace": {"$ref": "#/$defs/Pace"},
        "paces": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Pace"}}, {"type": "null"}], "default": None},
    }
    assert spec.parameters["$defs"] == spec.returns["$defs"] == {"Pace": {"title": "Pace", "enum": [0.5, 2]}}


def test_callers_pass_the_init_vars_of_a_dataclass() -> None:
    def f(scaled: Scaled) -> None: ...

    integer = {"type": "integer"}
    assert _of(f).parameters["$defs"] == {
        "Scaled": {
            "title": "Scaled", "type": "object", "properties": {"width": integer, "scale": integer | {"default": 1}},
            "required": ["width"],
        }
    }  # fmt: skip


class Walk(msgspec.Struct, rename="camel"):
    step_pace: Pace


class Trip(TypedDict):
    walk: Walk
    pause: NotRequired[Pace]


class Leg(NamedTuple):
    trip: Trip
    pace: Pace = Pace.SLOW


def test_adapted_hints_of_fields_are_in_the_schema_of_their_class() -> None:
    def f(leg: Leg) -> None: ...

    pace = {"$ref": "#/$defs/Pace"}
    spec = _of(f).parameters
    assert spec["properties"] == {"leg": {"$ref": "#/$defs/Leg"}}
    assert spec["$defs"] == {
        "Pace": {"title": "Pace", "enum": [0.5, 2]},
        "Walk": {"title": "Walk", "type": "object", "properties": {"stepPace": pace}, "required": ["stepPace"]},
        "Trip": {
            "title": "Trip", "type": "object", "properties": {"walk": {"$ref": "#/$defs/Walk"}, "pause": pace},
            "required": ["walk"],
        },
        "Leg": {
            "title": "Leg", "type": "array", "prefixItems": [{"$ref": "#/$defs/Trip"}, pace | {"default": 0.5}],
            "minItems": 1, "maxItems": 2,
        },
    }  # fmt: skip


def test_the_schema_of_a_union_of_classes_is_any_of() -> None:
    def f(either: Box | Label | Scaled, many: dict[str, Box | Label | None]) -> None: ...

    spec = _of(f).parameters
    box, label, scaled = ({"$ref": f"#/$defs/{name}"} for name in ("Box", "Label", "Scaled"))
    assert spec["properties"]["either"] == {"anyOf": [box, label, scaled]}
    many = spec["properties"]["many"]["additionalProperties"]
    assert many == {"anyOf": [{"anyOf": [box, label]}, {"type": "null"}]}
    assert sorted(spec["$defs"]) == ["Box", "Label", "Scaled"]
