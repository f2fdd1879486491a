"""Round trips of values, and errors for values that cannot be sent."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import random
import re
import subprocess
import sys
import threading
import uuid
import zoneinfo
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import cloudpickle
import msgspec
import numpy as np
import pydantic
import pytest

from gpufn_core.encoding import native, values
from gpufn_core.encoding.media import BYTES, JSON, MSGPACK, NATIVE, PICKLED
from gpufn_core.encoding.record_classes import RecordClasses
from gpufn_core.errors import InvalidInput, ResultNotEncodable


def iter_nothing() -> Iterator[int]:
    yield from ()


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None

    def __post_init__(self) -> None:
        self.x += 1  # must not run a second time


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int


class Pair(NamedTuple):
    first: int
    second: Any


class Text(str):
    """A type that msgpack would encode as text."""


class Exploit:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (pathlib.Path(self.path),)


class Box(msgspec.Struct):
    width: int = 1


class Model(pydantic.BaseModel):
    name: str
    size: int = pydantic.Field(default=1, alias="Size")


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1, -(2**63), 2**64, -(2**80), 1.5, "text", b"bytes", [1, [2]], {"a": {"b": 1}},
        (1, (2, [3])), {1, 2}, frozenset({1}), {(1, 2): 3, "x": 4}, {1: "one", None: 0}, 1 + 2j,
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        datetime.date(2026, 1, 2), datetime.time(1, 2), datetime.timedelta(days=1, microseconds=5),
        decimal.Decimal("1.10"), uuid.UUID(int=5), Colour.RED, Point(1, [Point(2)]), Frozen(3), Box(4),
        Model(name="n", Size=3), pathlib.PurePosixPath("/a"), range(3), np.float32(1.5), ValueError("x").args,
        Pair(1, ["two"]), pathlib.Path("a"), range(2**70), bytearray(b"a"), collections.OrderedDict({(1,): 2}),
        collections.Counter("aab"), collections.defaultdict(list, {1: [2]}), collections.deque([1, {2}], 3),
        datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        datetime.time(1, tzinfo=zoneinfo.ZoneInfo("Asia/Tokyo")), datetime.time(1, tzinfo=datetime.UTC),
    ],
    ids=repr,
)  # fmt: skip
def test_the_sdks_encoding_keeps_python_values_as_they_are(value: Any) -> None:
    content_type, body = values.encode_result(value, NATIVE)
    back = values.decode_value(content_type, body, find=native.loaded_class)
    assert (content_type, back, type(back)) == (NATIVE, value, type(value))
    assert str(getattr(back, "tzinfo", None)) == str(getattr(value, "tzinfo", None))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="int16").reshape(2, 3), np.zeros((0, 4)), np.array(3.5), np.ones((3, 2)).T,
        np.array(["a", "bc"]), np.array(["2026-01-01"], "M8[D]"), np.array([1 + 2j]), np.array([True, False]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), np.zeros(2, np.dtype("i1,f8", align=True)),
    ],
    ids=lambda array: str(array.dtype),
)  # fmt: skip
def test_arrays_keep_their_type_and_shape_and_can_be_written_to(array: np.ndarray) -> None:
    back = values.decode_value(*values.encode_result(array, NATIVE))
    assert (back.dtype, back.shape, back.tolist()) == (array.dtype, array.shape, array.tolist())
    assert back.flags.writeable


@pytest.mark.parametrize(
    "value",
    [lambda x: x, object(), np.array([None, "x"], dtype=object), threading.Thread, Text("a"), iter([])],
    ids=lambda value: type(value).__name__,
)
def test_an_unencodable_value_is_refused_where_it_is_made(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^f\[0\]: an? ") as argument:
        values.encode_call((), {"f": [value]})
    assert argument.value.field == "f[0]"
    with pytest.raises(ResultNotEncodable, match=r"result at \.f is an? "):
        values.encode_result({"f": value}, NATIVE)


def test_the_error_of_a_refused_value_has_a_remedy() -> None:
    with pytest.raises(InvalidInput, match=r"; send .* @gpu_function\(pickle=True\)"):
        values.encode_call((object(),), {})
    with pytest.raises(ResultNotEncodable, match=r"; return .* @gpu_function\(pickle=True\)"):
        values.encode_result(object(), NATIVE)


def test_pickles_are_made_on_request_and_read_on_request() -> None:
    body = values.encode_call((lambda x: x + 1,), {}, may_pickle=True)
    assert values.call_type(body) == PICKLED
    assert values.decode_call(body, allow_pickle=True)[0][0](1) == 2
    with pytest.raises(InvalidInput, match=r"a function .* pickle.*: send"):
        values.decode_call(body)
    content_type, result = values.encode_result([Text("a")], NATIVE, may_pickle=True)
    assert content_type == PICKLED
    assert values.decode_value(content_type, result, allow_pickle=True) == ["a"]
    with pytest.raises(InvalidInput, match=r"Text .* pickle.*trust_results=True"):
        values.decode_value(content_type, result)


def test_a_call_without_pickles_is_no_pickled_one() -> None:
    assert values.call_type(values.encode_call(({1},), {}, may_pickle=True)) == NATIVE
    assert values.encode_result({1}, NATIVE, may_pickle=True)[0] == NATIVE


@pytest.mark.parametrize("code", [40, 41])
def test_the_plain_encoding_never_holds_a_pickle(code: int, tmp_path: pathlib.Path) -> None:
    made = tmp_path / "made"
    pickle = cloudpickle.dumps(Exploit(str(made)))
    content = pickle if code == 40 else msgspec.msgpack.encode(["Exploit", pickle])
    body = msgspec.msgpack.encode({"args": [msgspec.msgpack.Ext(code, content)], "kwargs": {}})
    for decode in (
        lambda: values.decode_call(body),
        lambda: values.decode_value(NATIVE, body, allow_pickle=True),
        lambda: values.decode_value(PICKLED, body),
    ):
        with pytest.raises(InvalidInput):
            decode()
    assert not made.exists()


def test_a_class_that_is_not_loaded_here_leaves_its_fields() -> None:
    ext = msgspec.msgpack.Ext(30, msgspec.msgpack.encode(["elsewhere", "Thing", {"x": 1}]))
    assert values.decode_value(NATIVE, msgspec.msgpack.encode([ext]), find=native.loaded_class) == [{"x": 1}]
    body = msgspec.msgpack.encode({"args": [ext], "kwargs": {}})
    assert values.decode_call(body, find=native.loaded_class)[0] == [{"x": 1}]


def _record(value: Any, name: str = "Thing") -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(30, msgspec.msgpack.encode(["elsewhere", name, value]))


def test_fields_replace_a_record_at_any_place() -> None:
    sent = {"deque": collections.deque([Colour.RED]), "set": {Colour.RED}, "keys": {Pair(1, 2): Frozen(3)}}
    content_type, body = values.encode_result(sent, NATIVE)
    wanted = {"deque": collections.deque(["red"]), "set": {"red"}, "keys": {(1, 2): {"x": 3}}}
    assert values.decode_value(content_type, body) == wanted
    assert values.decode_call(msgspec.msgpack.encode({"args": [msgspec.Raw(body)]}))[0] == [wanted]


@pytest.mark.parametrize("value", [{Frozen(1)}, {Frozen(1): 2}, frozenset({(Frozen(1),)})])
def test_fields_that_cannot_be_hashed_are_refused_with_the_remedy(value: Any) -> None:
    content_type, body = values.encode_result(value, NATIVE)
    with pytest.raises(InvalidInput, match=r"unhashable value: .* type hint"):
        values.decode_value(content_type, body)


def test_a_pickle_under_the_other_content_type_is_refused_with_the_right_type() -> None:
    body = msgspec.msgpack.encode(msgspec.msgpack.Ext(41, msgspec.msgpack.encode(["T", b"."])))
    with pytest.raises(InvalidInput, match=r"T .* pickle.* application/vnd\.gpufn\.pickle"):
        values.decode_value(NATIVE, body, allow_pickle=True)


_PRIVATE = re.compile(r"0x[0-9a-f]{6}|gpufn\.\w|\b_[a-z]\w+|object at|<class|<lambda>")


def _random(make: random.Random, depth: int) -> Any:
    plain: Any = (
        None, 1, -1, 2**63, 1.5, "x", "NaN", "<U1", "<M8[Y]", "|V3", "int8", b"", bytes(8), b"\xff" * 8, [1], {}
    )  # fmt: skip
    pick = make.randrange(10)
    if depth <= 0 or pick < 3:
        return make.choice(plain)
    if pick < 5:
        return [_random(make, depth - 1) for _ in range(make.randrange(5))]
    if pick < 6:
        return {make.choice(("a", "b", 1)): _random(make, depth - 1) for _ in range(make.randrange(3))}
    code = make.choice([*range(1, 31), 40, 41, 99])
    if code in (20, 21, 22) and make.random() < 0.5:
        dtype = make.choice(
            ["<U1", ">U2", "<M8", "<M8[0Y]", "<M8[D]", "<m8", "|b1", "|S2", "<f8", "|V8", "<c8", "<f16"]
        )
        content = [dtype, [1], make.randbytes(np.dtype(dtype.replace("0Y", "Y")).itemsize)]
        content = [content[0], content[2]] if code == 21 else content
    elif code == 30:
        content = [__name__, make.choice(["Frozen", "Box", "Pair", "Colour", "Model"]), _random(make, depth - 1)]
    else:
        content = _random(make, depth - 1)
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))


def test_whatever_is_sent_is_a_value_or_a_refusal_without_private_names() -> None:
    make = random.Random(7)
    for _ in range(4000):
        body = msgspec.msgpack.encode(_random(make, 4))
        if make.random() < 0.3:
            body = body[: make.randrange(len(body) + 1)]
        if body and make.random() < 0.3:
            index = make.randrange(len(body))
            body = body[:index] + make.randbytes(1) + body[index + 1 :]
        try:
            value = values.decode_value(NATIVE, body, find=native.loaded_class)
        except InvalidInput as error:
            assert not _PRIVATE.search(error.message.replace("gpufn.pickle", "")), error.message  # noqa: PT017
        else:
            assert "gpufn" not in type(value).__module__
            assert repr(value)


def test_no_class_is_made_that_no_hint_names() -> None:
    content_type, body = values.encode_result([Point(1), Colour.RED, Pair(1, 2)], NATIVE)
    assert values.decode_value(content_type, body) == [{"x": 2, "y": None}, "red", (1, 2)]
    find = RecordClasses(lambda: [dict[str, Colour] | None]).find
    assert values.decode_value(content_type, body, find=find) == [{"x": 2, "y": None}, Colour.RED, (1, 2)]


class Shape: ...


@dataclasses.dataclass
class Circle(Shape):
    radius: float
    colour: Colour = Colour.RED


class Drawing(pydantic.BaseModel):
    main: Model
    shapes: list[Any] = []


def test_hints_name_the_classes_of_fields_and_their_subclasses_too() -> None:
    find = RecordClasses(lambda: [list[Shape], Drawing]).find
    for kind in (Circle, Colour, Drawing, Model):
        assert find(__name__, kind.__qualname__) is kind
    for name in ("Box", "Point", "Shape", "BaseModel"):
        assert find(__name__, name) is None
    anything = RecordClasses(lambda: [Any, object, enum.Enum, pydantic.BaseModel, msgspec.Struct, tuple]).find
    assert [anything(__name__, kind.__qualname__) for kind in (Colour, Model, Box, Pair)] == [None] * 4


@pytest.mark.parametrize(
    ("value", "json"),
    [
        ({"a": (1, 2), "b": {3}}, b'{"a":[1,2],"b":[3]}'),
        (np.arange(3), b"[0,1,2]"),
        ({"x": np.float64(0.5), "y": np.int8(3), "z": np.bool_(True), "s": np.str_("t")},
         b'{"x":0.5,"y":3,"z":true,"s":"t"}'),
        ([float("nan"), float("inf"), np.nan], b'["NaN","Infinity","NaN"]'),
        ({"x": (-np.inf, None)}, b'{"x":["-Infinity",null]}'),
        (np.array([1.5, np.nan], np.float32), b'[1.5,"NaN"]'),
        (Point(1, Frozen(2)), b'{"x":2,"y":{"x":2}}'),
        (Model(name="n"), b'{"name":"n","Size":1}'),
        (Box(), b'{"width":1}'),
        (Colour.RED, b'"red"'),
        ({"data": b"abc"}, b'{"data":"YWJj"}'),
        (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), b'"2026-01-02T00:00:00Z"'),
        (range(2), b"[0,1]"),
        ({1: 2}.keys(), b"[1]"),
        (pathlib.PurePosixPath("/a"), b'"/a"'),
        (None, b"null"),
    ],
)  # fmt: skip
def test_results_as_json(value: Any, json: bytes) -> None:
    assert values.encode_result(value, JSON) == (JSON, json)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", JSON), ("*/*", JSON), ("text/html, application/msgpack;q=0.9", MSGPACK), (NATIVE, NATIVE),
        ("application/json; charset=utf-8", JSON), ("text/event-stream", JSON), ("application/x-msgpack", MSGPACK),
    ],
)  # fmt: skip
def test_the_caller_chooses_the_encoding(accept: str, content_type: str) -> None:
    assert values.encode_result([1], accept)[0] == content_type


def test_bytes_answer_as_bytes_where_json_would_spoil_them() -> None:
    assert values.encode_result(b"\xff", JSON) == (BYTES, b"\xff")
    assert values.encode_result(bytearray(b"\xff"), "*/*") == (BYTES, b"\xff")
    assert values.decode_value(BYTES, b"\xff") == b"\xff"
    assert values.decode_value(*values.encode_result(b"\xff", MSGPACK)) == b"\xff"


_ITSELF: list[Any] = []
_ITSELF.append(_ITSELF)


@pytest.mark.parametrize(
    ("value", "accept", "message"),
    [
        ({"rows": [1, {"bad": 1j}]}, JSON, "the result at .rows[1].bad is a complex, which cannot be sent as"),
        (object(), JSON, "the result is an object, which cannot be sent as application/json: object has no JSON form"),
        (Point(1, object()), MSGPACK, "the result at .y is an object, which cannot be sent as application/msgpack"),
        ({(1, 2): 3}, JSON, "the result is a dict, which cannot be sent as application/json: a key of a map must"),
        ("\ud800", JSON, "the result is a str, which cannot be sent as application/json"),
        (_ITSELF, JSON, "the result contains itself"),
        (_ITSELF, NATIVE, "the result contains itself"),
        ([iter([])], NATIVE, "the result at [0] is a list_iterator, which cannot be sent as application/vnd.gpufn"),
        ({"g": iter_nothing()}, NATIVE, "the result at .g is a generator, which cannot be sent as"),
        (bytes(8 << 20), NATIVE, "the result takes 8,388,613 bytes, more than the 7,864,320 of one call: store it and"),
    ],
    ids=range(10),
)  # fmt: skip
def test_an_unencodable_result_names_the_place_and_the_value(value: Any, accept: str, message: str) -> None:
    with pytest.raises(ResultNotEncodable) as caught:
        values.encode_result(value, accept)
    assert caught.value.message.startswith(message)


async def _nothing() -> None: ...


async def _no_items() -> AsyncIterator[int]:
    yield 1


def test_the_error_of_a_coroutine_or_an_iterator_names_the_way_to_a_value() -> None:
    coroutine = _nothing()
    for value, remedy in (
        (iter_nothing(), "; make a list of it"),
        ([coroutine], "; await it"),
        (_no_items(), "; make a list of it: [item async for item in ...]"),
        (object(), "has no JSON form"),
    ):
        with pytest.raises(ResultNotEncodable) as result:
            values.encode_result(value, JSON)
        assert result.value.message.endswith(remedy)
    with pytest.raises(InvalidInput) as argument:
        values.encode_call((iter_nothing(),), {})
    assert argument.value.message.endswith("list of it")
    coroutine.close()


def test_an_argument_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(InvalidInput) as caught:
        values.encode_call((), {"source": [iter_nothing()]})
    assert caught.value.field == "source[0]"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\xc1", b"\x93", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"args": 1}),
        msgspec.msgpack.encode({"kwargs": {1: 2}}), msgspec.msgpack.encode(msgspec.msgpack.Ext(99, b"\xc0")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(20, msgspec.msgpack.encode(["|O", [1], b"12345678"]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(20, msgspec.msgpack.encode(["<f4", [1 << 40], b""]))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(40, b"not a pickle")), b"\x91" * 100_000,
        msgspec.msgpack.encode(msgspec.msgpack.Ext(30, msgspec.msgpack.encode([1]))),
    ],
)  # fmt: skip
def test_an_undecodable_body_is_invalid_input(body: bytes) -> None:
    with pytest.raises(InvalidInput):
        values.decode_call(body, allow_pickle=True, find=native.loaded_class)


def test_looking_at_values_imports_nothing_heavy() -> None:
    code = (
        "import sys; from gpufn_core.encoding import media, values\n"
        "values.encode_result([1, {'a': 2.5}], media.NATIVE)\n"
        "print([name for name in ('numpy', 'pydantic', 'cloudpickle', 'asyncio') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_result_in_its_final_form_stays_in_parts_and_its_size_is_that_of_all() -> None:
    encoded = values.Encoded("application/x-two", (b"ab", memoryview(b"cd")))
    assert values.encode_parts(encoded, JSON, limit_bytes=4) is encoded
    assert values.encode_result(encoded, JSON) == ("application/x-two", b"abcd")
    with pytest.raises(ResultNotEncodable, match="takes 4 bytes, more than the 3"):
        values.encode_parts(encoded, JSON, limit_bytes=3)
