"""Tables of pandas, pyarrow and polars as Arrow IPC streams, and checks of a stream from an untrusted sender.

Before a library reads a stream, `_check_messages` walks its messages. It rejects compressed buffers, which may expand a
thousandfold, and extension types, which may run code when they are read. Afterwards the types, the number of rows and
all offsets are checked, because Arrow itself trusts a stream.
"""

from __future__ import annotations

import io
import struct
import sys
from typing import Any, Final

from gpufn_core.errors import InvalidInput

KINDS: Final = frozenset(
    ("pandas.DataFrame", "pandas.Series", "pyarrow.Table", "pyarrow.RecordBatch", "polars.DataFrame", "polars.Series")
)
_COLUMN: Final = "values"  # column name of a Series
_ROWS_PER_BYTE: Final = 8  # a column of booleans; only columns of nulls have more rows per byte
_CONTINUATION: Final = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_EXTENSION: Final = b"ARROW:extension:"

Table = tuple[str, Any, bytes]


def write(value: Any) -> Table | None:
    """Return the kind of table, the name of a Series, and the stream; None if `value` is not a table that can be
    sent."""
    kind = type(value)
    name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    if name not in KINDS or getattr(sys.modules[kind.__module__.partition(".")[0]], kind.__name__, None) is not kind:
        return None
    label = getattr(value, "name", None) if name.endswith(".Series") else None
    if label is not None and type(label) not in (str, int):
        return None
    stream = _polars_stream(value) if name.startswith("polars.") else _arrow_stream(value)
    return None if stream is None else (name, label, stream)


def _polars_stream(value: Any) -> bytes | None:
    polars = sys.modules["polars"]
    frame = value.to_frame() if type(value) is polars.Series else value
    if any(each.base_type() is polars.Object for each in frame.dtypes):
        return None
    out = io.BytesIO()
    frame.write_ipc_stream(out, compression="uncompressed")
    return out.getvalue()


def _arrow_stream(value: Any) -> bytes | None:
    try:
        import pyarrow  # noqa: PLC0415
    except ImportError:
        return None
    table = value
    if type(value).__module__.startswith("pandas"):
        frame = value.to_frame(_COLUMN) if type(value).__name__ == "Series" else value
        try:
            table = pyarrow.Table.from_pandas(frame)
        except (pyarrow.ArrowException, TypeError, ValueError):  # a column of objects of several types
            return None
    if not all(_is_accepted(pyarrow, field.type) for field in table.schema):
        return None
    out = io.BytesIO()
    with pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write(table)
    return out.getvalue()


def read(kind: str, label: Any, data: bytes) -> Any:
    """Read a table from a stream; its libraries must be installed. Raises InvalidInput or the library's own error."""
    if kind not in KINDS:
        raise InvalidInput(f"{kind[:80]!r} is not a supported kind of table")
    if label is not None and type(label) not in (str, int):
        raise InvalidInput("the name of a Series must be text or a number")
    _check_messages(memoryview(data))
    return _to_polars(kind, label, data) if kind.startswith("polars.") else _to_arrow(kind, label, data)


def _to_polars(kind: str, label: Any, data: bytes) -> Any:
    import polars  # noqa: PLC0415

    try:
        frame = polars.read_ipc_stream(io.BytesIO(data))
    except Exception:
        raise
    except BaseException as error:  # a panic of polars' Rust code is not an Exception
        raise InvalidInput(f"a table cannot be read: {type(error).__name__}") from None
    _check_rows(frame.height, data)
    return frame.to_series().alias(label or "") if kind == "polars.Series" else frame


def _to_arrow(kind: str, label: Any, data: bytes) -> Any:
    import pyarrow  # noqa: PLC0415

    with pyarrow.ipc.open_stream(pyarrow.py_buffer(data)) as reader:
        for field in reader.schema:
            if not _is_accepted(pyarrow, field.type):
                raise InvalidInput(f"a table has a column of {field.type}, which is not supported in Arrow form"[:300])
        table = reader.read_all()
    _check_rows(table.num_rows, data)
    table.validate(full=True)  # offsets, lengths and indices, which the reader does not check
    if kind == "pyarrow.Table":
        return table
    if kind == "pyarrow.RecordBatch":
        return pyarrow.RecordBatch.from_struct_array(table.to_struct_array().combine_chunks())
    frame = table.to_pandas()
    return frame[_COLUMN].copy().rename(label) if kind == "pandas.Series" else frame.copy()  # writable copies


def _check_rows(rows: int, data: bytes) -> None:
    if rows > _ROWS_PER_BYTE * len(data):
        raise InvalidInput(f"a table of {rows:,} rows cannot fit in {len(data):,} bytes")


def _is_accepted(arrow: Any, kind: Any, *, is_nested: bool = False) -> bool:  # noqa: PLR0911  (a table of types)
    """Return whether columns of this type are allowed. Every element must take bytes: otherwise a few bytes could hold
    billions of elements."""
    types = arrow.types
    if types.is_null(kind) or types.is_dictionary(kind):
        return not is_nested and (types.is_null(kind) or _is_accepted(arrow, kind.value_type, is_nested=True))
    if types.is_struct(kind):
        return bool(kind.num_fields) and all(_is_accepted(arrow, field.type, is_nested=True) for field in kind)
    if types.is_fixed_size_list(kind):
        return bool(kind.list_size) and _is_accepted(arrow, kind.value_type, is_nested=True)
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_accepted(arrow, kind.value_type, is_nested=True)
    if types.is_map(kind):
        return all(_is_accepted(arrow, each, is_nested=True) for each in (kind.key_type, kind.item_type))
    if types.is_fixed_size_binary(kind):
        return bool(kind.byte_width > 0)
    return bool(types.is_primitive(kind) or types.is_decimal(kind)) or _is_text(types, kind)


def _is_text(types: Any, kind: Any) -> bool:
    tests = ("is_string", "is_large_string", "is_string_view", "is_binary", "is_large_binary", "is_binary_view")
    return any(test(kind) for name in tests if (test := getattr(types, name, None)) is not None)


# --- the messages of a stream ----------------------------------------------------------------------------------------


def _check_messages(data: memoryview) -> None:
    """Raise InvalidInput for a stream that is truncated, compressed, or has extension types."""
    try:
        at = 0
        while at < len(data):
            marker, length = struct.unpack_from("<II", data, at)
            if marker != _CONTINUATION:
                raise InvalidInput("a table is not an Arrow stream")
            if not length:
                return
            metadata = data[at + 8 : at + 8 + length]
            if len(metadata) < length:
                raise InvalidInput("a table is truncated")
            at += 8 + length + _check_message(metadata)
    except struct.error:
        raise InvalidInput("a table is truncated") from None


def _check_message(metadata: memoryview) -> int:
    """Check a message and return the length of its body."""
    if _EXTENSION in bytes(metadata):
        raise InvalidInput("a table has an extension type, which may run code when it is read")
    message = _Table(metadata, struct.unpack_from("<I", metadata, 0)[0])
    kind, header = message.number(1, "<B"), message.table(2)
    if kind == _DICTIONARY and header is not None:
        header = header.table(1)
    elif kind not in (_SCHEMA, _BATCH):
        raise InvalidInput("a table has a message of an unknown kind")
    if header is None:
        raise InvalidInput("a table has an empty message")
    if kind != _SCHEMA and header.has(3):
        raise InvalidInput("a table is compressed, which is not accepted because it may expand a thousandfold")
    length = message.number(3, "<q")
    if length < 0:
        raise InvalidInput("a table has a message of negative length")
    return length


class _Table:
    """A flatbuffer table: its fields, by number. Arrow's format defines the numbers (Message.fbs)."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - struct.unpack_from("<i", data, at)[0]  # its vtable
        if self._fields < 0:
            raise InvalidInput("a table has a corrupt message")
        self._size = struct.unpack_from("<H", data, self._fields)[0]

    def has(self, field: int) -> bool:
        return self._offset_of(field) is not None

    def number(self, field: int, form: str) -> int:
        offset = self._offset_of(field)
        return 0 if offset is None else int(struct.unpack_from(form, self._data, offset)[0])

    def table(self, field: int) -> _Table | None:
        offset = self._offset_of(field)
        return None if offset is None else _Table(self._data, offset + struct.unpack_from("<I", self._data, offset)[0])

    def _offset_of(self, field: int) -> int | None:
        slot = 4 + 2 * field
        offset = struct.unpack_from("<H", self._data, self._fields + slot)[0] if slot + 2 <= self._size else 0
        return self._at + offset if offset else None
