"""Encoding of values of numpy, pandas, pyarrow, polars, torch and PIL, and input from a hostile sender."""

from __future__ import annotations

import io
import re
import struct
import sys
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest

from gpufn_core.encoding import arrow_stream, native, values
from gpufn_core.encoding.media import NATIVE
from gpufn_core.errors import InvalidInput


def there_and_back(value: Any) -> Any:
    content_type, body = values.encode_result(value, NATIVE)
    assert content_type == NATIVE
    return values.decode_value(content_type, body)


def refused(code: int, content: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        native.decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))))
    return caught.value.message


# numpy


@pytest.mark.parametrize(
    "content",
    [
        ["|O", [1], bytes(8)], ["O", [1], bytes(8)], ["f4,O", [1], bytes(12)], ["(9999999,)f4", [1], b""],
        [["f4"], [1], bytes(4)], ["<f4", [1 << 40], b""], ["<f4", [-1, -1], bytes(4)], ["<f4", [2], bytes(4)],
        ["<f4", 1, bytes(4)], ["<f4", [1.0], bytes(4)], ["<f4", [1] * 33, bytes(4)], ["<U0", [1 << 40], b""],
        ["<U999999999", [0, 1 << 40], b""], ["<f4", [0, 1 << 62], b""], ["<f4", [True], bytes(4)],
        ["<f4", [1]], ["<f4", [1], "text"], None, 7, {"a": 1},
    ],
)  # fmt: skip
def test_an_array_that_claims_more_than_it_has_is_refused(content: Any) -> None:
    assert refused(20, content)


@pytest.mark.parametrize(
    "content",
    [
        [[["a", "|O", 0]], 8, [1], bytes(8)], [[["a", "<f4", 100]], 4, [1], bytes(4)],
        [[["a", "<f4", -4]], 4, [1], bytes(4)], [[["a", "<f4", 0]], 1 << 40, [1], bytes(4)],
        [[], 0, [1 << 40], b""], [[[1, "<f4", 0]], 4, [1], bytes(4)], [[["a", "<f4", 0, "title"]], 4, [1], bytes(4)],
        [[["a", "<f4", 0]] * 2000, 4, [1], bytes(4)],
    ],
)  # fmt: skip
def test_a_structured_array_has_plain_fields_inside_its_items(content: Any) -> None:
    assert refused(22, content)


@pytest.mark.parametrize("dtype", ["<U1", ">U1", "|U1", "<M8[0Y]", "<m8[00D]", "<M8"])
def test_bytes_without_a_numpy_value_are_refused(dtype: str) -> None:
    data = b"\x7f" * np.dtype(dtype.replace("0", "")).itemsize
    for code, content in ((20, [dtype, [1], data]), (21, [dtype, data])):
        assert refused(code, content)
    assert refused(22, [[["n", "|i1", 0], ["a", dtype, 1]], 1 + len(data), [1], b"\0" + data])


def test_text_and_times_of_all_kinds_arrive() -> None:
    for array in (np.array(["\U0010ffff", "a"]), np.array(["é"], ">U3"), np.array(["NaT"], "M8"), np.array([5], "m8"),
                  np.array([("é", 1)], [("t", "<U2"), ("n", "i1")])):  # fmt: skip
        assert repr(there_and_back(array)) == repr(array)


@pytest.mark.parametrize(
    ("code", "content"),
    [
        (20, 7), (20, [msgspec.msgpack.Ext(41, b""), [1], b"1"]), (23, [["float32"], [1], bytes(4), False]),
        (25, [["pandas.DataFrame"], None, b""]), (25, [{}, None, b""]), (24, [b"no image"]), (24, 7), (21, [[], b""]),
        (15, b""), (18, [[], "a"]), (9, 3), (7, [1]), (13, 1), (30, 1), (30, ["a", 1, 2]), (41, 1), (5, ["a", "b"]),
    ],
)  # fmt: skip
def test_refusals_show_no_private_names_and_no_addresses(code: int, content: Any) -> None:
    message = refused(code, content)
    assert not re.search(r"0x[0-9a-f]+|\b_\w|gpufn|Error|object at|<", message), message


def test_numbers_of_many_digits_are_refused_before_they_cost_time() -> None:
    assert "longer than" in refused(6, "9" * 5000)
    assert "longer than" in refused(14, "9" * 50_000)
    assert "longer than" in refused(7, ["0", "9" * 5000, "1"])


@pytest.mark.parametrize("code", [1, 2, 4, 9])
def test_forms_nested_too_deeply_are_refused(code: int) -> None:
    body = msgspec.msgpack.encode([])
    for _ in range(3000):
        body = msgspec.msgpack.encode([msgspec.msgpack.Ext(code, body)])
    with pytest.raises(InvalidInput):
        native.decode(body)


@pytest.mark.parametrize("zone", ["../../etc/passwd", "/etc/passwd", "No/Such", "", "x" * 5000, 7, None])
def test_a_time_zone_must_exist(zone: Any) -> None:
    assert refused(16, ["2026-01-01T00:00:00", zone, 0])


def test_a_path_and_a_collection_are_of_known_kinds() -> None:
    assert "pathlib" in refused(18, ["os", "a"])
    assert refused(9, ["deque", [1], "x"])
    assert refused(9, ["defaultdict", [], "eval"])
    assert refused(9, ["UserDict", [], None])


def test_a_value_of_a_newer_release_is_refused() -> None:
    assert "newer gpufn" in refused(29, [])
    assert "newer gpufn" in refused(99, [])


# Tables


def _frame() -> Any:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    return pandas.DataFrame(
        {
            "whole": [1, 2], "text": ["a", None], "real": [1.5, float("nan")], "is": [True, False],
            "at": pandas.to_datetime(["2026-01-01", "2026-01-02"]).tz_localize("Europe/Berlin"),
            "kind": pandas.Categorical(["u", "v"], ordered=True),
        },
        index=["r", "s"],
    )  # fmt: skip


def test_data_frames_and_series_arrive_unchanged() -> None:
    frame = _frame()
    pandas = pytest.importorskip("pandas")
    pandas.testing.assert_frame_equal(there_and_back({"frame": frame})["frame"], frame)
    by_number = pandas.DataFrame(np.arange(6.0).reshape(2, 3))
    pandas.testing.assert_frame_equal(there_and_back(by_number), by_number)
    several = frame.set_index(["whole", "text"])
    pandas.testing.assert_frame_equal(there_and_back(several), several)
    for name in ("name", 3, None):
        series = pandas.Series([1.5, 2.5], name=name)
        pandas.testing.assert_series_equal(there_and_back(series), series)
    back = there_and_back(pandas.DataFrame({"x": [1.0]}))
    back.iloc[0, 0] = 2.0


def test_a_column_of_objects_of_several_types_has_no_form() -> None:
    pandas = pytest.importorskip("pandas")
    for frame in (
        pandas.DataFrame({"x": [1, "a", object()]}),
        pandas.DataFrame({"x": pandas.period_range("2026", periods=2)}),
    ):
        with pytest.raises(native.NoForm):
            native.encode(frame)
        assert isinstance(native.encode(frame, may_pickle=True), native.Pickled)


def test_arrow_tables_arrive_unchanged() -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table(
        {"a": [1, None], "b": [[1.5], []], "c": [{"x": "y"}, None], "d": arrow.array(["u", "u"]).dictionary_encode()}
    )
    assert there_and_back(table).equals(table)
    batch = table.select(["a", "b"]).to_batches()[0]
    assert there_and_back(batch).equals(batch)
    assert there_and_back(table.slice(0, 0)).equals(table.slice(0, 0))


def test_polars_frames_arrive_unchanged() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame({"a": [1, None], "b": ["x", "y"], "c": [[1], [2, 3]]})
    back = there_and_back(frame)
    assert (back.schema, back.equals(frame)) == (frame.schema, True)
    series = polars.Series("n", [1, 2])
    assert there_and_back(series).equals(series, check_names=True)


def _stream(arrow: Any, table: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    with arrow.ipc.new_stream(out, table.schema, options=arrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write(table)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["pyarrow.Table", "pandas.DataFrame", "polars.DataFrame"])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_tables_are_refused_before_they_expand(kind: str, compression: str) -> None:
    pytest.importorskip(kind.partition(".")[0])
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"a": np.zeros(1 << 20)})
    assert "is compressed" in refused(25, [kind, None, _stream(arrow, table, compression=compression)])
    texts = arrow.table({"a": arrow.array(["long text"] * 1000).dictionary_encode()})
    assert "is compressed" in refused(25, [kind, None, _stream(arrow, texts, compression=compression)])


def test_extension_types_are_refused_before_they_are_read() -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    ran = []

    class Program(arrow.ExtensionType):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(arrow.int64(), "program")

        def __arrow_ext_serialize__(self) -> bytes:
            return b""

        @classmethod
        def __arrow_ext_deserialize__(cls, storage: Any, serialized: bytes) -> Any:
            ran.append(serialized)
            return cls()

    table = arrow.table({"a": arrow.ExtensionArray.from_storage(Program(), arrow.array([1]))})
    with pytest.raises(native.NoForm):
        native.encode(table)
    stream = _stream(arrow, table)
    arrow.register_extension_type(Program())
    ran.clear()
    try:
        assert "extension type" in refused(25, ["pyarrow.Table", None, stream])
    finally:
        arrow.unregister_extension_type("program")
    assert ran == []


def test_a_few_bytes_are_no_billions_of_rows() -> None:
    arrow = pytest.importorskip("pyarrow")
    nulls = arrow.table({"a": arrow.nulls(1 << 30)})
    assert "cannot fit in" in refused(25, ["pandas.DataFrame", None, _stream(arrow, nulls)])
    for kind in (arrow.list_(arrow.null()), arrow.list_(arrow.int8(), 0), arrow.binary(0), arrow.struct([])):
        hollow = arrow.table({"a": arrow.array([None], kind)})
        assert str(kind) in refused(25, ["pyarrow.Table", None, _stream(arrow, hollow)])


def test_a_table_whose_offsets_point_outside_is_refused() -> None:
    arrow = pytest.importorskip("pyarrow")
    stream = _stream(arrow, arrow.table({"a": ["abcdefgh", "ijklmnop"]}))
    offsets = struct.pack("<3i", 0, 8, 16)
    assert stream.count(offsets) == 1
    for bad in ((0, 8, 1 << 20), (0, -8, 16), (0, 1 << 30, 16)):
        assert refused(25, ["pyarrow.Table", None, stream.replace(offsets, struct.pack("<3i", *bad))])


def test_damaged_streams_are_refused() -> None:
    arrow = pytest.importorskip("pyarrow")
    stream = _stream(arrow, arrow.table({"a": [1, 2, 3]}))
    for data in (b"", stream[:9], stream[:40], stream[4:], b"PAR1" + stream, b"\xff" * 64, b"ARROW1\0\0" + stream):
        assert refused(25, ["pyarrow.Table", None, data])
    for index in range(0, 200, 3):
        flipped = bytearray(stream)
        flipped[index] ^= 0xFF
        try:
            arrow_stream.read("pyarrow.Table", None, bytes(flipped))
        except Exception as error:
            assert not isinstance(error, MemoryError)  # noqa: PT017
    for kind in ("os.system", "pandas", None, 3):
        assert refused(25, [kind, None, stream])
    assert refused(25, ["pandas.Series", [1], stream])


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    assert "pip install polars" in refused(25, ["polars.DataFrame", None, b""])


# Images


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_images_arrive_unchanged(mode: str) -> None:
    image = pytest.importorskip("PIL.Image").new(mode, (3, 2), 1)
    back = there_and_back([image])[0]
    assert (back.mode, back.size, back.tobytes()) == (image.mode, image.size, image.tobytes())


def test_an_image_that_png_would_change_has_no_form() -> None:
    image = pytest.importorskip("PIL.Image")
    for mode in ("CMYK", "F", "YCbCr"):
        with pytest.raises(native.NoForm):
            native.encode(image.new(mode, (3, 2)))


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_images_of_other_formats_and_of_too_many_pixels_are_refused() -> None:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("RGB", (3, 2)).save(out, "TIFF")
    assert "PNG" in refused(24, [out.getvalue()])
    for size in ((20_000, 10_000), (9_500, 9_500), (60_000, 60_000)):
        assert "too large" in refused(24, [_png(*size)]) or "Bomb" in refused(24, [_png(*size)])


# torch


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_arrive_unchanged(dtype: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(shape, dtype=getattr(torch, dtype))
    back = there_and_back({"x": tensor})["x"]
    assert (back.dtype, back.shape, back.tolist()) == (tensor.dtype, tensor.shape, tensor.tolist())
    assert torch.equal(there_and_back(torch.arange(6.0).reshape(2, 3).T), torch.arange(6.0).reshape(2, 3).T)


@pytest.mark.parametrize("dtype", ["load", "quint8", "hub", 7])
def test_a_tensor_is_of_a_known_dtype(dtype: Any) -> None:
    assert "torch dtype" in refused(23, [dtype, [1], bytes(4), False])
