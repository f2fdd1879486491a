"""Bodies are decoded into arguments, or the error names the field that does not fit."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn.declare.hints.hint_adapters import adapt_hint
from gpufn_core.encoding import native, values
from gpufn_core.encoding.media import JSON, MSGPACK, NATIVE
from gpufn_core.errors import InvalidInput, UnsupportedMediaType
from gpufn_runtime.worker.arguments.parameters import Parameters


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Box(msgspec.Struct):
    width: int


class Model(pydantic.BaseModel):
    name: str
    size: int = 1


class Options(TypedDict, total=False):
    top: int


class Opaque:
    pass


def many(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    text: str = "",
    point: Point | None = None,
    box: Box | None = None,
    model: Model | None = None,
    data: bytes = b"",
    at: datetime.datetime | None = None,
    options: Options | None = None,
    mode: Literal["a", "b"] = "a",
    ratio: float = None,  # type: ignore[assignment]  # noqa: RUF013
    anything=0,
    items: Iterable[int] = (),
    opaque: Opaque | None = None,
    for_type_checkers: Nowhere = 0,  # type: ignore[name-defined]  # noqa: F821
) -> None: ...


def arrays(a: np.ndarray, b: npt.NDArray[np.float32] | None = None) -> None: ...


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        (b"", {}),
        (b"{}", {}),
        (b'{"text": "t"}', {"text": "t"}),
        (b'{"point": {"x": 1}}', {"point": Point(1)}),
        (b'{"box": {"width": 2}}', {"box": Box(2)}),
        (b'{"model": {"name": "n"}}', {"model": Model(name="n")}),
        (b'{"data": "YWJj"}', {"data": b"abc"}),
        (b'{"at": "2026-01-02T00:00:00"}', {"at": datetime.datetime(2026, 1, 2)}),
        (b'{"options": {"top": 3}}', {"options": {"top": 3}}),
        (b'{"ratio": 1}', {"ratio": 1.0}),
        (b'{"ratio": null}', {"ratio": None}),
        (b'{"anything": [1, "x"]}', {"anything": [1, "x"]}),
        (b'{"items": [1]}', {"items": [1]}),
        (b'{"for_type_checkers": [1]}', {"for_type_checkers": [1]}),
    ],
)
def test_json_is_converted_to_the_hints(body: bytes, arguments: dict[str, Any]) -> None:
    assert Parameters(many).bind(JSON, body) == ([], arguments)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"text": 1}', "text: expected str, got int"),
        (b'{"point": {"x": "no"}}', "point.x: expected int, got str"),
        (b'{"point": {}}', "point.x: missing"),
        (b'{"model": {"size": 1}}', "model: name: Field required"),
        (b'{"options": {"top": "x"}}', "options.top: expected int, got str"),
        (b'{"mode": "c"}', "mode: invalid enum value 'c'"),
        (b'{"at": "yesterday"}', "at: invalid RFC3339 encoded datetime"),
        (b'{"opaque": 1}', "opaque: expected Opaque, got int"),
        (b'{"tex": 1}', "tex: there is no such parameter; it takes text='', point=None"),
        (b"[1]", "the body must be a map from parameters to values: expected object, got array"),
        (b'{"text": ', "the body is not valid JSON: "),
        (b'{"text": "\xff"}', "the body is not valid JSON: "),
    ],
)
def test_json_that_does_not_fit_names_the_field(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Parameters(many).bind(JSON, body)
    assert caught.value.message.startswith(message)
    if ":" in message and not message.startswith("the body "):
        assert caught.value.field == message.partition(":")[0]


def test_lists_become_arrays_for_a_parameter_that_is_one() -> None:
    _, arguments = Parameters(arrays).bind(JSON, b'{"a": [[1, 2], [3, 4]], "b": [1]}')
    assert (arguments["a"].shape, arguments["b"].dtype) == ((2, 2), np.float32)
    for body, message in ((b'{"a": [[1], [2, 3]]}', "a: "), (b'{"a": [{}]}', "a: expected an array of numbers")):
        with pytest.raises(InvalidInput) as caught:
            Parameters(arrays).bind(JSON, body)
        assert caught.value.message.startswith(message)


def test_msgpack_is_the_same_map_with_bytes_as_they_are() -> None:
    body = msgspec.msgpack.encode({"data": b"\xff", "point": {"x": 1}})
    assert Parameters(many).bind(MSGPACK, body) == ([], {"data": b"\xff", "point": Point(1)})
    with pytest.raises(InvalidInput, match=r"^a key\b.*\bstr\b.*\bint$"):
        Parameters(many).bind(MSGPACK, msgspec.msgpack.encode({1: 1}))


def test_the_sdk_passes_python_values_as_plain_python_would() -> None:
    given = {"point": Point(1), "ratio": True, "items": "not checked", "opaque": 1}
    assert Parameters(many).bind(NATIVE, values.encode_call(("t",), given)) == (["t"], given)


def plainly(  # type: ignore[no-untyped-def]
    *many: int,
    text: str = "",
    number: float = 0,
    data: bytes = b"",
    texts: list[str] = [],  # noqa: B006
    sizes: dict[str, tuple[int, ...]] = {},  # noqa: B006
    factor: Annotated[int, msgspec.Meta(ge=1, le=10)] = 1,
    words: list[Annotated[str, msgspec.Meta(min_length=2)]] = [],  # noqa: B006
    point: Point | None = None,
    boxes: list[Box] = [],  # noqa: B006
    paths: list[pathlib.Path] = [],  # noqa: B006
    array: np.ndarray | None = None,
): ...


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"text": 1}, "text: expected str, got int"),
        ({"text": b"t"}, "text: expected str, got bytes"),
        ({"text": True}, "text: expected str, got bool"),
        ({"number": "1"}, "number: expected float, got str"),
        ({"data": "YWJj"}, "data: expected bytes, got str"),
        ({"texts": "t"}, "texts: expected array, got str"),
        ({"texts": ["t", 1]}, "texts[1]: expected str, got int"),
        ({"sizes": {"a": (1, "b")}}, "sizes[...][1]: expected int, got str"),
        ({"factor": 11}, "factor: expected int <= 10"),
        ({"factor": "3"}, "factor: expected int, got str"),
        ({"words": ["ab", "c"]}, "words[1]: expected str of length >= 2"),
        ({"point": 1}, "point: expected object | null, got int"),
        ({"point": {"x": "no"}}, "point.x: expected int, got str"),
        ({"boxes": [{}]}, "boxes[0].width: missing"),
        ({"paths": "p"}, "paths: expected array, got str"),
    ],
)
def test_the_sdks_values_of_a_wrong_plain_type_name_the_field_as_json_does(
    kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        Parameters(plainly).bind(NATIVE, values.encode_call((), kwargs))
    assert (caught.value.message, caught.value.field) == (message, message.partition(":")[0])
    if "data" not in kwargs and "paths" not in kwargs and kwargs != {"text": b"t"}:  # JSON has no bytes
        with pytest.raises(InvalidInput) as by_json:
            Parameters(plainly).bind(JSON, msgspec.json.encode(kwargs))
        assert (by_json.value.message, by_json.value.field) == (message, caught.value.field)


def test_each_of_many_positional_values_is_checked() -> None:
    assert Parameters(plainly).bind(NATIVE, values.encode_call((1, 2, True), {})) == ([1, 2, True], {})
    with pytest.raises(InvalidInput, match=r"^many\[2\]: .*int.*str$"):
        Parameters(plainly).bind(NATIVE, values.encode_call((1, 2, "3"), {}))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"number": 1, "texts": ("a", "b"), "sizes": {"a": [1, True]}},
        {"number": np.float32(1), "many": np.int64(2)},
        {"factor": 10, "words": ["ab"]},
        {"texts": [pathlib.PurePosixPath("p")], "paths": [pathlib.PurePosixPath("p")]},
        {"point": None, "boxes": [Box(1)]},
        {"array": "anything"},
    ],
)
def test_values_of_the_sdk_stay_unchanged(kwargs: dict[str, Any]) -> None:
    args = (kwargs.pop("many"),) if "many" in kwargs else ()
    bound_args, bound = Parameters(plainly).bind(NATIVE, values.encode_call(args, kwargs))
    assert [(type(value), value) for value in (*bound_args, *bound.values())] == [
        (type(value), value) for value in (*args, *kwargs.values())
    ]


def test_a_dict_from_the_sdk_becomes_the_class_that_the_hint_names() -> None:
    body = values.encode_call((), {"point": {"x": 1}, "boxes": [{"width": 2}, Box(3)]})
    assert Parameters(plainly).bind(NATIVE, body) == ([], {"point": Point(1), "boxes": [Box(2), Box(3)]})


def test_a_record_of_an_unknown_class_becomes_the_type_of_the_hint() -> None:
    ext = msgspec.msgpack.Ext(30, msgspec.msgpack.encode(["script", "Point", {"x": 1, "y": 2}]))
    body = msgspec.msgpack.encode({"args": ["t", ext], "kwargs": {"anything": ext}})
    assert Parameters(many).bind(NATIVE, body) == (["t", Point(1, 2)], {"anything": {"x": 1, "y": 2}})


def _two(a: int, /, b: int, *, c: int = 3) -> None: ...


@pytest.mark.parametrize(
    ("content_type", "body", "message", "field"),
    [
        (NATIVE, values.encode_call((1,), {}), "missing a required argument: 'b'; it takes a, b, c=3", "b"),
        (NATIVE, values.encode_call((1, 2, 3), {}), "too many positional arguments", None),
        (NATIVE, values.encode_call((1, 2), {"d": 1}), "got an unexpected keyword argument 'd'", "d"),
        (JSON, b'{"a": 1}', "b: missing", "b"),
    ],
)
def test_arguments_that_do_not_match_the_signature(
    content_type: str, body: bytes, message: str, field: str | None
) -> None:
    with pytest.raises(InvalidInput) as caught:
        Parameters(_two).bind(content_type, body)
    assert caught.value.message.startswith(message)
    assert caught.value.field == field


def test_positional_only_parameters_are_passed_by_name_too() -> None:
    assert Parameters(_two).bind(JSON, b'{"a": 1, "b": 2}') == ([1], {"b": 2})


def _any(a: int, **more: Any) -> None: ...
def _floats(a: int, **more: float) -> None: ...
def _points(a: int, **more: Point) -> None: ...


def _forms(**given: Any) -> Iterator[tuple[str, bytes]]:
    yield JSON, msgspec.json.encode(given)
    yield MSGPACK, msgspec.msgpack.encode(given)
    yield NATIVE, values.encode_call((), given)


@pytest.mark.parametrize(
    ("call", "given", "wanted"),
    [
        (_any, {"z": [2]}, "{'a': 1, 'z': [2]}"),
        (_floats, {"x": 2.5, "more": 3.5}, "{'a': 1, 'x': 2.5, 'more': 3.5}"),
        (_points, {"z": {"x": 2}}, "{'a': 1, 'z': Point(x=2, y=0)}"),
    ],
)
def test_keywords_of_any_name_are_converted_to_their_hint(
    call: Callable[..., None], given: dict[str, Any], wanted: str
) -> None:
    for kind, body in _forms(a=1, **given):
        assert repr(Parameters(call).bind(kind, body)) == f"([], {wanted})", kind


def test_whole_numbers_for_keywords_that_are_floats_become_these() -> None:
    bind = Parameters(_floats).bind
    for kind, body in ((JSON, b'{"a": 1, "x": 2}'), (MSGPACK, msgspec.msgpack.encode({"a": 1, "x": 2}))):
        assert repr(bind(kind, body)) == "([], {'a': 1, 'x': 2.0})"


@pytest.mark.parametrize(
    ("call", "given", "message", "field"),
    [
        (_any, {"a": "x"}, "a: expected int, got str", "a"),
        (_any, {}, "missing a required argument: 'a'", "a"),
        (_floats, {"a": 1, "x": "2"}, "x: expected float, got str", "x"),
        (_points, {"a": 1, "z": {"x": "no"}}, "z.x: expected int, got str", "z.x"),
    ],
)
def test_keywords_of_any_name_are_refused_if_they_do_not_match_their_hint(
    call: Callable[..., None], given: dict[str, Any], message: str, field: str
) -> None:
    for kind, body in _forms(**given):
        with pytest.raises(InvalidInput) as caught:
            Parameters(call).bind(kind, body)
        assert (caught.value.message.startswith(message), caught.value.field) == (True, field), caught.value.message


def test_another_content_type_is_for_the_bytes_parameter_only() -> None:
    def classify(image: bytes, top: int = 5) -> None: ...

    assert Parameters(classify, raw_parameter="image").bind("image/png", b"\x89") == ([], {"image": b"\x89"})
    with pytest.raises(UnsupportedMediaType):
        Parameters(classify).bind("image/png", b"\x89")
    with pytest.raises(InvalidInput, match=r"missing.*'top'"):
        Parameters(lambda image, top: None, raw_parameter="image").bind("image/png", b"\x89")


def test_a_batched_parameter_accepts_one_element_of_its_list() -> None:
    def embed(texts: list[str], top: list[int] = [5], free=(None,)) -> None: ...  # type: ignore[no-untyped-def]  # noqa: B006

    assert Parameters(embed, batched=True).by_name(JSON, b'{"texts": "a"}') == {"texts": "a", "top": 5, "free": None}


def test_a_batched_parameter_with_the_default_none_accepts_null() -> None:
    def embed(texts: list[str], lang: list[str] = [None]) -> None: ...  # type: ignore[list-item]  # noqa: B006

    assert Parameters(embed, batched=True).by_name(JSON, b'{"texts": "a", "lang": null}')["lang"] is None


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str = "line"
    points: list[Point] = dataclasses.field(default_factory=list)
    by_name: dict[str, Point] | None = None


class Drawing(TypedDict):
    shapes: list[Shape]


@pytest.mark.parametrize(
    ("hint", "given", "returned"),
    [
        (Point, {"x": 1}, {"x": 1, "y": 0}),
        (Point | None, {"x": 1}, {"x": 1, "y": 0}),
        (
            Shape,
            {"points": [{"x": 1}], "by_name": {"a": {"x": 2}}},
            {"name": "line", "points": [{"x": 1, "y": 0}], "by_name": {"a": {"x": 2, "y": 0}}},
        ),
        (Drawing, {"shapes": [{}]}, {"shapes": [{"name": "line", "points": [], "by_name": None}]}),
        (tuple[Point, ...], [{"x": 1}], [{"x": 1, "y": 0}]),
    ],
)
@pytest.mark.parametrize("is_open", [False, True])
def test_a_dataclass_has_the_defaults_that_were_left_out_when_it_is_returned(
    hint: Any, given: Any, returned: Any, is_open: bool
) -> None:
    def echo(value) -> None: ...  # type: ignore[no-untyped-def]

    def more(value, **others) -> None: ...  # type: ignore[no-untyped-def]

    function = more if is_open else echo
    function.__annotations__["value"] = hint
    for kind, body in (
        (JSON, msgspec.json.encode({"value": given})),
        (MSGPACK, msgspec.msgpack.encode({"value": given})),
    ):
        got = Parameters(function).by_name(kind, body)["value"]
        assert msgspec.json.decode(values.encode_result(got, JSON)[1]) == returned


@contextlib.contextmanager
def timed() -> Iterator[None]:
    yield


def test_hints_are_read_where_they_were_written_and_not_where_a_decorator_was() -> None:
    @timed()  # which wraps it in a function of contextlib
    def at(point: Point) -> None: ...

    assert Parameters(at).bind(JSON, b'{"point": {"x": 1}}') == ([], {"point": Point(1)})


def test_text_becomes_the_path_that_a_hint_names() -> None:
    def read(path: pathlib.Path, others: list[pathlib.PurePosixPath] = []) -> None: ...  # noqa: B006

    parameters = Parameters(read)
    got = parameters.by_name(JSON, b'{"path": "/a/b", "others": ["c"]}')
    assert got == {"path": pathlib.Path("/a/b"), "others": [pathlib.PurePosixPath("c")]}
    with pytest.raises(InvalidInput, match=r"^path: .*Path.*int$"):
        parameters.bind(JSON, b'{"path": 3}')


def test_a_dataclass_that_is_made_of_a_dict_has_its_defaults() -> None:
    def echo(value: Point) -> None: ...

    got = Parameters(echo).by_name(NATIVE, values.encode_call(({"x": 1},), {}))["value"]
    assert vars(got) == {"x": 1, "y": 0}


def test_a_validator_that_fails_in_its_own_way_is_the_inputs_fault() -> None:
    @dataclasses.dataclass
    class Picky:
        x: int

        def __post_init__(self) -> None:
            raise RuntimeError("no")

    def f(p) -> None: ...  # type: ignore[no-untyped-def]

    f.__annotations__["p"] = Picky
    with pytest.raises(InvalidInput, match="RuntimeError: no"):
        Parameters(f).bind(JSON, b'{"p": {"x": 1}}')


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


def test_a_number_that_json_lacks_names_its_argument() -> None:
    for body, field in ((b'{"ratio": NaN}', "ratio"), (b'{"anything": {"a": [1, -Infinity]}}', "anything.a[1]")):
        with pytest.raises(InvalidInput, match=r": JSON has no (NaN|-Infinity) \(byte") as caught:
            Parameters(many).bind(JSON, body)
        assert (caught.value.field, caught.value.message.partition(":")[0]) == (field, field)


def test_a_pickle_is_refused_with_the_accepted_types() -> None:
    ext = msgspec.msgpack.Ext(41, msgspec.msgpack.encode(["T", b"."]))
    body = msgspec.msgpack.encode({"args": [ext]})
    for may_pickle, said in ((True, "of the content type application/vnd.gpufn.pickle"), (False, "pickle=True")):
        with pytest.raises(InvalidInput, match=said):
            Parameters(many, may_pickle=may_pickle).bind(NATIVE, body)


_ENCODED = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=3)
    | st.binary(max_size=3) | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=6)),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["text", "point", "at", "data", "args", "kwargs", "x"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(st.sampled_from([JSON, MSGPACK, NATIVE]), _ENCODED.map(msgspec.msgpack.encode) | st.binary(max_size=30))
def test_any_body_is_decoded_or_is_refused_as_the_clients_fault(content_type: str, body: bytes) -> None:
    with contextlib.suppress(InvalidInput):
        _MANY.bind(content_type, body)


@pytest.mark.parametrize("content_type", [MSGPACK, NATIVE])
def test_a_body_that_is_nested_too_deeply_is_refused(content_type: str) -> None:
    for body in (b"\x91" * 100_000, b"\x81\xa4text" + b"\x91" * 100_000, b"\x81\xa4new_" + b"\x91" * 100_000 + b"\xc0"):
        with pytest.raises(InvalidInput):
            _MANY.bind(content_type, body)


_MANY = Parameters(many)
