"""Arguments for hints that name classes: dataclasses, records, and types that msgspec cannot read."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, NotRequired, TypedDict

import msgspec
import numpy as np
import pydantic
import pytest

from gpufn.declare.hints.hint_adapters import adapt_hint
from gpufn_core.encoding import native, values
from gpufn_core.encoding.media import JSON, MSGPACK, NATIVE
from gpufn_core.errors import InvalidInput
from gpufn_runtime.worker.arguments.parameters import Parameters


class Box(msgspec.Struct):
    width: int


@dataclasses.dataclass
class Rectangle:
    width: int
    height: int = 2
    area: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.area = self.width * self.height


@dataclasses.dataclass(slots=True, frozen=True)
class Frame:
    inner: Rectangle
    outline: int = dataclasses.field(init=False)
    later: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outline", 2 * (self.inner.width + self.inner.height))


@pytest.mark.parametrize("is_open", [False, True])
def test_a_field_that_a_dataclass_computes_may_be_missing(is_open: bool) -> None:
    def take(frames: list[Frame]) -> None: ...

    def take_more(frames: list[Frame], **others: int) -> None: ...

    parameters = Parameters(take_more if is_open else take)
    rectangle, outlined = {"width": 3, "height": 2, "area": 6}, {"outline": 10}
    for sent in ({"inner": {"width": 3}}, {"inner": {"width": 3, "area": 7}, "outline": 1}):
        for kind, body in (
            (JSON, msgspec.json.encode({"frames": [sent]})),
            (MSGPACK, msgspec.msgpack.encode({"frames": [sent]})),
            (NATIVE, values.encode_call(([sent],), {})),
        ):
            (made,) = parameters.by_name(kind, body)["frames"]
            assert msgspec.to_builtins(made) == {"inner": rectangle} | outlined
            assert not hasattr(made, "later")
    field = next(each for each in dataclasses.fields(Rectangle) if each.name == "area")
    assert (field.default, field.default_factory) == (dataclasses.MISSING, dataclasses.MISSING)


class Pace(enum.Enum):
    SLOW = 0.5
    FAST = 2
    PAIR = (1, 2)


@dataclasses.dataclass
class Scaled:
    width: int
    scale: dataclasses.InitVar[int] = 2
    area: int = dataclasses.field(init=False)

    def __post_init__(self, scale: int) -> None:
        self.area = self.width * scale


@dataclasses.dataclass
class Circle:
    radius: float
    colour: str = "red"


@dataclasses.dataclass
class Square:
    side: float
    colour: str = "red"


def of_stand_ins(
    pace: Pace = Pace.SLOW,
    paces: list[Pace] | None = None,
    scaled: Scaled | None = None,
    shape: Circle | Square | None = None,
    shapes: list[Circle | Box | Scaled] = [],  # noqa: B006
) -> None: ...


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (b'{"pace": 2, "paces": [0.5, [1, 2]]}', {"pace": Pace.FAST, "paces": [Pace.SLOW, Pace.PAIR]}),
        (b'{"scaled": null, "shape": null}', {"scaled": None, "shape": None}),
        (b'{"shape": {"side": 1}}', {"shape": Square(1.0)}),
        (b'{"shape": {"radius": 1, "colour": "blue"}}', {"shape": Circle(1.0, "blue")}),
        (b'{"shapes": [{"width": 1}, {"radius": 1}]}', {"shapes": [Box(1), Circle(1.0)]}),
    ],
)
def test_json_is_converted_to_hints_that_msgspec_cannot_read(body: bytes, arguments: dict[str, Any]) -> None:
    assert Parameters(of_stand_ins).bind(JSON, body) == ([], arguments)
    assert Parameters(of_stand_ins).bind(MSGPACK, msgspec.msgpack.encode(msgspec.json.decode(body))) == ([], arguments)


@pytest.mark.parametrize("encode", [msgspec.json.encode, lambda named: values.encode_call((), named)])
def test_a_dataclass_gets_the_arguments_of_its_constructor(encode: Callable[[Any], bytes]) -> None:
    kind = JSON if encode is msgspec.json.encode else NATIVE
    _, given = Parameters(of_stand_ins).bind(kind, encode({"scaled": {"width": 3, "scale": 5}}))
    assert (given["scaled"].width, given["scaled"].area) == (3, 15)
    _, given = Parameters(of_stand_ins).bind(kind, encode({"shapes": [{"width": 3, "scale": 2}]}))
    assert type(given["shapes"][0]) is Scaled, "Box has no scale"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"pace": 0.7}', "pace: 0.7 is none of 0.5, 2, (1, 2)"),
        (b'{"paces": [2, "fast"]}', "paces[1]: 'fast' is none of 0.5, 2, (1, 2)"),
        (b'{"scaled": {"width": 1, "scale": "x"}}', "scaled: scale: expected int, got str"),
        (b'{"shape": {"radius": "x"}}',
         "shape: not a Circle: radius: expected float, got str; not a Square: object missing required field side"),
        (b'{"shapes": [3]}', "shapes[0]: expected Circle or Box or Scaled, got int"),
    ],
)  # fmt: skip
def test_a_mismatch_with_such_a_hint_names_the_field(body: bytes, said: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        Parameters(of_stand_ins).bind(JSON, body)
    assert raised.value.message == said


class Walk(msgspec.Struct, rename="camel", kw_only=True):
    step_pace: Pace
    steps: int = 1


class Trip(TypedDict):
    walk: Walk
    pause: NotRequired[Pace]


class Leg(NamedTuple):
    name: str
    shape: Circle | Square
    pace: Pace = Pace.SLOW


@dataclasses.dataclass
class Route:
    legs: list[Leg]
    trip: Trip | None = None


@dataclasses.dataclass
class Road:
    pace: Pace
    forks: list[Road] = dataclasses.field(default_factory=list)


def field_hints(walk: Walk | None = None, trip: Trip | None = None, route: Route | None = None) -> None: ...


@pytest.mark.parametrize("encode", [msgspec.json.encode, lambda named: values.encode_call((), named)])
@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"walk": {"stepPace": 2}}, {"walk": Walk(step_pace=Pace.FAST)}),
        ({"trip": {"walk": {"stepPace": 0.5, "steps": 3}}}, {"trip": {"walk": Walk(step_pace=Pace.SLOW, steps=3)}}),
        ({"trip": {"walk": {"stepPace": 2}, "pause": [1, 2]}},
         {"trip": {"walk": Walk(step_pace=Pace.FAST), "pause": Pace.PAIR}}),
        ({"route": {"legs": [["a", {"side": 1.0}], ["b", {"radius": 1.0}, 2]]}},
         {"route": Route([Leg("a", Square(1.0)), Leg("b", Circle(1.0), Pace.FAST)])}),
    ],
)  # fmt: skip
def test_such_hints_of_fields_are_read_as_well(encode: Callable[[Any], bytes], given: Any, made: Any) -> None:
    kind = JSON if encode is msgspec.json.encode else NATIVE
    assert Parameters(field_hints).bind(kind, encode(given)) == ([], made)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"walk": {"stepPace": 3}}, "walk: stepPace: 3 is none of 0.5, 2, (1, 2)"),
        ({"walk": {}}, "walk: object missing required field stepPace"),
        ({"trip": {"walk": {"stepPace": 2}, "pause": 3}}, "trip: pause: 3 is none of 0.5, 2, (1, 2)"),
        ({"route": {"legs": [["a"]]}}, "route: legs[0]: expected array of at least length 2, got 1"),
    ],
)
def test_a_mismatch_with_the_hint_of_a_field_names_the_field(given: Any, said: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        Parameters(field_hints).bind(JSON, msgspec.json.encode(given))
    assert raised.value.message == said


def test_a_class_that_has_itself_in_a_field_beside_such_a_hint_is_not_read() -> None:
    def f(road: Road) -> None: ...

    given = {"road": {"pace": 2, "forks": [{"pace": 0.5}]}}
    assert Parameters(f).bind(JSON, msgspec.json.encode(given)) == ([], given)
    assert adapt_hint(Road) is Road


def test_python_values_for_such_hints_stay_unchanged() -> None:
    given = {"pace": Pace.FAST, "scaled": Scaled(1), "shape": Square(1.0), "shapes": [Circle(1.0), Box(2)]}
    assert Parameters(of_stand_ins).bind(NATIVE, values.encode_call((), given)) == ([], given)
    _, made = Parameters(of_stand_ins).bind(NATIVE, values.encode_call((), {"shape": {"side": 1.0}}))
    assert made == {"shape": Square(1.0)}
    with pytest.raises(InvalidInput, match=r"^shape: not a Circle: .*; not a Square: "):
        Parameters(of_stand_ins).bind(NATIVE, values.encode_call((), {"shape": {"corners": 1}}))


class Limits(msgspec.Struct, rename="camel", tag="limits"):
    most_items: Annotated[int, msgspec.Meta(gt=0)] = 1


class Spot(NamedTuple):
    x: float
    label: str | None = None


class Person(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(alias="Name")
    age: int = pydantic.Field(default=1, gt=0)
    spot: Spot | None = None


class Tags(pydantic.RootModel[list[str]]):
    pass


@dataclasses.dataclass
class Node:
    value: int
    nodes: list[Node] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Leaf(Node):
    colour: str = "green"


@dataclasses.dataclass(frozen=True)
class Rich:
    array: np.ndarray
    at: datetime.datetime
    price: decimal.Decimal
    sizes: Sequence[int]
    queue: collections.deque[Spot]
    mixed: np.ndarray | list[float] | pathlib.PurePosixPath
    node: Node | Spot
    counts: collections.Counter[str]
    scale: float = 1.0


@dataclasses.dataclass
class Guarded:
    path: str
    seen: int = dataclasses.field(default=0, compare=False)
    is_admin: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if self.path.startswith("/"):
            raise ValueError("an absolute path")
        self.is_admin = self.path == "admin"
        self.seen += 1


def take(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    anything=None,
    limits: Limits | None = None,
    spot: Spot | None = None,
    person: Person | None = None,
    people: list[Person] = [],  # noqa: B006
    tags: Tags | None = None,
    nodes: list[Node] = [],  # noqa: B006
    rich: Rich | None = None,
    guarded: Guarded | None = None,
    pace: Pace = Pace.SLOW,
    scaled: Scaled | None = None,
) -> None: ...


def _sent(name: str, kind: type, fields: Any) -> bytes:
    """A handwritten record of `kind` with any fields."""
    inner = msgspec.Raw(native.encode(fields))
    ext = msgspec.msgpack.Ext(30, msgspec.msgpack.encode([kind.__module__, kind.__qualname__, inner]))
    return msgspec.msgpack.encode({"args": [], "kwargs": {name: ext}})


@pytest.mark.parametrize(
    ("name", "kind", "fields", "said"),
    [
        ("limits", Limits, {"most_items": "x"}, "limits: Limits: most_items: expected int, got str"),
        ("limits", Limits, {"most_items": -1}, "limits: Limits: most_items: expected int >= 1"),
        ("limits", Limits, {"most_items": np.int64(-1)}, "limits: Limits: most_items: expected int >= 1"),
        ("limits", Limits, [1], "limits: Limits: its fields do not match the class"),
        ("spot", Spot, ("x", None), "spot: Spot: x: expected float, got str"),
        ("spot", Spot, (1.0,), "spot: Spot: its fields do not match the class"),
        ("person", Person, {"name": 1}, "person: Person: name: Input should be a valid string"),
        ("person", Person, {"name": "n", "age": 0}, "person: Person: age: Input should be greater than 0"),
        ("person", Person, {"name": "n", "x": 0}, "person: Person: x: Extra inputs are not permitted"),
        ("tags", Tags, {"root": [1]}, "tags: Tags: 0: Input should be a valid string"),
        ("nodes", Leaf, {"value": 1, "colour": 2}, "nodes: Leaf: colour: expected str, got int"),
        ("nodes", Node, {"value": 1, "nodes": [{"value": "x"}]}, "nodes: Node: nodes[0]: value: expected int, got str"),
        ("nodes", Node, {}, "nodes: Node: object missing required field value"),
        ("nodes", Node, {"value": decimal.Decimal(1)}, "nodes: Node: value: expected int, got decimal"),
        ("guarded", Guarded, {"path": "/etc"}, "guarded: Guarded: ValueError: an absolute path"),
        ("guarded", Guarded, {"path": "me", "is_admin": True}, "guarded: Guarded: is_admin: the constructor changes"),
        ("scaled", Scaled, {"width": 3, "area": 15}, "scaled: Scaled: area: the constructor changes the value"),
        ("pace", Pace, 7, "pace: Pace: ValueError: 7 is not a valid Pace"),
        ("anything", Limits, {"most_items": "x"}, "anything: Limits: most_items: expected int, got str"),
    ],
)
def test_the_fields_of_a_record_are_those_that_its_class_accepts(name: str, kind: type, fields: Any, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Parameters(take).bind(NATIVE, _sent(name, kind, fields))
    assert (caught.value.message[: len(said)], caught.value.field) == (said, name)


def _rich() -> Rich:
    queue = collections.deque([Spot(1.5)], 3)
    return Rich(
        np.arange(3), datetime.datetime(2026, 1, 2), decimal.Decimal("1.10"), (1, 2), queue, np.ones(2),
        Leaf(1, [Leaf(2, colour="red")]), collections.Counter("aab"), np.float32(0.5),  # type: ignore[arg-type]
    )  # fmt: skip


def test_instances_arrive_unchanged_with_the_values_that_json_lacks() -> None:
    sent = {
        "limits": Limits(2), "spot": Spot(1.5, "a"), "person": Person(Name="n", spot=Spot(3.0)), "pace": Pace.PAIR,
        "people": [Person(Name="m")], "tags": Tags(["a"]), "nodes": [Leaf(1, [Node(2)])], "guarded": Guarded("admin"),
        "scaled": Scaled(3), "anything": [Spot(1.0)],
    }  # fmt: skip
    assert Parameters(take).bind(NATIVE, values.encode_call((), sent)) == ([], sent)
    _, got = Parameters(take).bind(NATIVE, values.encode_call((), {"rich": _rich()}))
    assert repr(got["rich"]) == repr(dataclasses.replace(_rich(), scale=0.5)), "numpy's numbers become Python's"


@pytest.mark.parametrize("change", [{"queue": collections.deque([("x", None)])}, {"sizes": ("a",)}, {"mixed": {"a": 1}},
                                    {"node": decimal.Decimal(1)}, {"counts": [1]}, {"at": 3}])  # fmt: skip
def test_a_field_of_a_rich_type_is_checked_as_well(change: dict[str, Any]) -> None:
    fields = {field.name: getattr(_rich(), field.name) for field in dataclasses.fields(Rich)}
    with pytest.raises(InvalidInput, match=f"rich: Rich: {next(iter(change))}"):
        Parameters(take).bind(NATIVE, _sent("rich", Rich, fields | change))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"person": {"Name": 1}}, "person: name: Input should be a valid string"),
        ({"people": [{"Name": "n"}, {}]}, "people[1]: name: Field required"),
        ({"person": 7}, "person: input should be a valid dictionary or instance of Person"),
        ({"nodes": [{"value": "x", "more": np.arange(2)}]}, "nodes[0]: value: expected int, got str"),
        ({"nodes": [decimal.Decimal(1)]}, "nodes[0]: expected object, got decimal"),
        ({"pace": "fast"}, "pace: 'fast' is none of 0.5, 2, (1, 2)"),
    ],
)
def test_plain_maps_from_the_sdk_are_checked_where_the_hint_is_a_class(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Parameters(take).bind(NATIVE, values.encode_call((), given))
    assert (caught.value.message, caught.value.field) == (said, said.partition(":")[0])
    _, made = Parameters(take).bind(NATIVE, values.encode_call((), {"person": {"Name": "n"}}))
    assert made == {"person": Person(Name="n")}


def test_a_damaged_argument_is_named() -> None:
    array = msgspec.msgpack.Ext(20, msgspec.msgpack.encode(7))
    for body in ({"args": [1, array], "kwargs": {}}, {"args": [], "kwargs": {"limits": array}}):
        with pytest.raises(InvalidInput, match=r"^limits: .*numpy") as caught:
            Parameters(take).bind(NATIVE, msgspec.msgpack.encode(body))
        assert caught.value.field == "limits"
