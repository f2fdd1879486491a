"""Bodies are decoded into arguments, or the error names the field that does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufn_core.encoding import values
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
