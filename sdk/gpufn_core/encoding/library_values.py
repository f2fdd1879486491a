"""Values of numpy, pandas, pyarrow, polars, torch and PIL in the SDK's encoding (`gpufn_core.encoding.native`).

    numpy.ndarray, numpy.generic     dtype, shape and bytes; a structured dtype of plain fields too
    torch.Tensor                     dtype, shape and bytes; it decodes to a CPU tensor
    pandas.DataFrame, pandas.Series  an Arrow stream (`gpufn_core.encoding.arrow_stream`)
    pyarrow.Table, RecordBatch       an Arrow stream
    polars.DataFrame, polars.Series  an Arrow stream
    PIL.Image.Image                  PNG

`form_of` imports none of the libraries: their values exist only if they are loaded. `value_of` imports the library of a
value, and checks everything that an untrusted sender can choose: dtype names, shapes, sizes, and the format of an
image.
"""

from __future__ import annotations

import importlib
import io
import math
import re
import sys
from collections.abc import Callable
from typing import Any, Final

import msgspec

from gpufn_core.errors import InvalidInput

# Ext codes: see `gpufn_core.encoding.native`.
_ARRAY, _NUMPY_SCALAR, _STRUCTURED_ARRAY, _TENSOR, _IMAGE, _ARROW = 20, 21, 22, 23, 24, 25

Form = tuple[int, Any]

# A dtype of numbers, times or text, as in `numpy.dtype.str`. None of them contains objects.
_DTYPE: Final = re.compile(r"[<>|=][biufcmMSUV?]\d{1,9}(\[([1-9]\d{0,8})?[a-zA-Zμ]{1,2}\])?")
_MAX_DIMENSIONS: Final = 32
_MAX_FIELDS: Final = 1000
_MAX_ELEMENTS: Final = 1 << 40  # an array without bytes has no other limit on its shape
_TORCH_DTYPES: Final = frozenset(
    {
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    }
)
_PNG_MODES: Final = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})  # lossless
_MAX_PIXELS: Final = 89_478_485  # PIL warns about larger images: 256 MiB of RGB


def form_of(value: Any) -> Form | None:
    """Return the Ext code and content of `value`; None if its type is not supported."""
    library = type(value).__module__.partition(".")[0]
    make = _FORMS.get(library)
    return None if make is None or library not in sys.modules else make(value)


def value_of(code: int, data: memoryview) -> Any:
    """Decode the value of an Ext. Raises InvalidInput, whose message contains no text of the library."""
    if code not in _VALUES:
        raise InvalidInput(f"a value has the unknown form {code}: a newer gpufn sent it")
    name, make = _VALUES[code]
    try:
        content = msgspec.msgpack.decode(data, type=list[Any], ext_hook=_no_ext)
        return make(*content)
    except InvalidInput:
        raise
    except Exception as error:  # its text may show local addresses and names
        raise InvalidInput(f"{name} was sent in a damaged form") from error


def _no_ext(code: int, _: memoryview) -> Any:
    raise InvalidInput(f"a library value contains a nested value of the form {code}, which is not allowed")


def _require(module: str, package: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidInput(f"a {what} was sent, but {package} is not installed here: pip install {package}") from error


# --- numpy -----------------------------------------------------------------------------------------------------------


def _numpy_form(value: Any) -> Form | None:
    numpy = sys.modules["numpy"]
    if not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return None
    dtype = value.dtype
    if dtype.names is not None:
        fields = None if isinstance(value, numpy.generic) else _fields_of(dtype)
        return None if fields is None else (_STRUCTURED_ARRAY, [fields, dtype.itemsize, value.shape, value.tobytes()])
    if _DTYPE.fullmatch(dtype.str) is None:  # objects
        return None
    if isinstance(value, numpy.generic):
        return _NUMPY_SCALAR, [dtype.str, value.tobytes()]
    return _ARRAY, [dtype.str, value.shape, value.tobytes()]


def _fields_of(dtype: Any) -> list[list[Any]] | None:
    """Return name, dtype and offset of each field; None if a field is not a plain value."""
    fields = [(name, *dtype.fields[name]) for name in dtype.names]
    if any(len(field) != 3 or field[1].subdtype is not None or not _DTYPE.fullmatch(field[1].str) for field in fields):
        return None
    return [[name, each.str, offset] for name, each, offset in fields]


def _dtype(text: Any) -> Any:
    numpy = _require("numpy", "numpy", "numpy array")
    if not isinstance(text, str) or _DTYPE.fullmatch(text) is None:
        raise InvalidInput(f"{_shown(text)} is not a dtype of plain values")
    return numpy.dtype(text)


def _array(dtype: Any, shape: Any, data: Any) -> Any:
    return _shaped(_dtype(dtype), shape, data)


def _structured(fields: Any, item_bytes: Any, shape: Any, data: Any) -> Any:
    numpy = _require("numpy", "numpy", "numpy array")
    if not isinstance(fields, list) or len(fields) > _MAX_FIELDS:
        raise InvalidInput(f"an array has at most {_MAX_FIELDS} fields")
    names, dtypes, offsets = zip(*fields, strict=True)
    formats = [_dtype(each) for each in dtypes]
    dtype = {"names": list(names), "formats": formats, "offsets": list(offsets), "itemsize": item_bytes}
    return _shaped(numpy.dtype(dtype), shape, data)


def _shaped(dtype: Any, shape: Any, data: Any) -> Any:
    numpy = sys.modules["numpy"]
    _check_shape(shape, dtype.itemsize, len(data))
    if not len(data):
        return numpy.empty(shape, dtype)
    array = numpy.frombuffer(bytearray(data), dtype)  # a bytearray makes the array writable
    for part in [array] if dtype.names is None else [array[name] for name in dtype.names]:
        _check_values(numpy, part)
    return array.reshape(shape)


def _check_values(numpy: Any, array: Any) -> None:
    """Reject bytes that numpy accepts but cannot convert to a Python value."""
    kind = array.dtype
    if kind.kind == "U":
        points = numpy.ascontiguousarray(array).view(numpy.dtype("u4").newbyteorder(kind.byteorder))
        if points.max() > sys.maxunicode:
            raise InvalidInput("an array of text has bytes that are not text")
    elif kind.kind == "M" and numpy.datetime_data(kind)[0] == "generic" and not numpy.isnat(array).all():
        raise InvalidInput("an array of times without a unit has a time that is not NaT")


def _check_shape(shape: Any, item_bytes: int, size: int) -> None:
    """Check that the bytes exactly fill the shape, so that a shape cannot claim memory for data that was not sent."""
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(_is_length(each) for each in shape):
        raise InvalidInput(f"a shape has at most {_MAX_DIMENSIONS} lengths")
    if not item_bytes or math.prod(shape) * item_bytes != size:
        raise InvalidInput(f"{size:,} bytes do not fill an array of the shape {tuple(shape)}")
    if math.prod(filter(None, shape)) * item_bytes > _MAX_ELEMENTS:
        raise InvalidInput(f"an array of the shape {tuple(shape)} is too large")


def _shown(text: Any) -> str:
    return repr(text[:80]) if isinstance(text, str) else f"a {type(text).__name__}"


def _is_length(value: Any) -> bool:
    return type(value) is int and value >= 0


# --- torch -----------------------------------------------------------------------------------------------------------


def _torch_form(value: Any) -> Form | None:
    torch = sys.modules["torch"]
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_quantized:
        return None
    name = str(value.dtype).removeprefix("torch.")
    if name not in _TORCH_DTYPES:
        return None
    flat = value.detach().cpu().contiguous().reshape(-1)
    return _TENSOR, [name, list(value.shape), flat.view(torch.uint8).numpy().tobytes(), bool(value.requires_grad)]


def _tensor(dtype: Any, shape: Any, data: Any, requires_grad: Any) -> Any:
    if not isinstance(dtype, str) or dtype not in _TORCH_DTYPES:
        raise InvalidInput(f"{_shown(dtype)} is not a supported torch dtype")
    torch = _require("torch", "torch", "torch tensor")
    kind = getattr(torch, dtype)
    _check_shape(shape, kind.itemsize, len(data))
    flat = torch.frombuffer(bytearray(data), dtype=kind) if len(data) else torch.empty(0, dtype=kind)
    return flat.reshape(shape).requires_grad_(bool(requires_grad))


# --- PIL -------------------------------------------------------------------------------------------------------------


def _pil_form(value: Any) -> Form | None:
    image = sys.modules.get("PIL.Image")
    if image is None or not isinstance(value, image.Image) or value.mode not in _PNG_MODES:
        return None
    if not 0 < value.width * value.height <= _MAX_PIXELS:
        return None
    out = io.BytesIO()
    value.save(out, "PNG", compress_level=1)
    return _IMAGE, [out.getvalue()]


def _image(data: Any) -> Any:
    image = _require("PIL.Image", "pillow", "PIL image")
    try:
        decoded = image.open(io.BytesIO(data), formats=("PNG",))  # other decoders are a large attack surface
        if decoded.width * decoded.height > _MAX_PIXELS:
            raise InvalidInput(f"an image of {decoded.width} x {decoded.height} pixels is too large to be sent")
        decoded.load()
    except (image.DecompressionBombError, image.DecompressionBombWarning):
        raise InvalidInput("an image is too large to be sent: it has too many pixels") from None
    except (OSError, SyntaxError, ValueError):  # PIL raises SyntaxError for a broken chunk
        raise InvalidInput("an image is not a PNG or is corrupt") from None
    return decoded


# --- tables ----------------------------------------------------------------------------------------------------------


def _table_form(value: Any) -> Form | None:
    from gpufn_core.encoding import arrow_stream  # noqa: PLC0415

    table = arrow_stream.write(value)
    return None if table is None else (_ARROW, list(table))


def _table(kind: Any, label: Any, data: Any) -> Any:
    from gpufn_core.encoding import arrow_stream  # noqa: PLC0415

    packages = {"pandas": ("pyarrow", "pandas"), "polars": ("polars",)}
    if not isinstance(kind, str) or kind not in arrow_stream.KINDS:
        raise InvalidInput(f"{_shown(kind)} is not a supported kind of table")
    for package in packages.get(kind.partition(".")[0], ("pyarrow",)):
        _require(package, package, "table")
    return arrow_stream.read(kind, label, data)


_FORMS: dict[str, Callable[[Any], Form | None]] = {
    "numpy": _numpy_form,
    "torch": _torch_form,
    "PIL": _pil_form,
    "pandas": _table_form,
    "pyarrow": _table_form,
    "polars": _table_form,
}
# The name of each form in error messages, and the function that makes its value.
_VALUES: dict[int, tuple[str, Callable[..., Any]]] = {
    _ARRAY: ("a numpy array", _array),
    _NUMPY_SCALAR: ("a numpy scalar", lambda dtype, data: _array(dtype, [1], data)[0]),
    _STRUCTURED_ARRAY: ("a structured numpy array", _structured),
    _TENSOR: ("a torch tensor", _tensor),
    _IMAGE: ("an image", _image),
    _ARROW: ("a table", _table),
}
