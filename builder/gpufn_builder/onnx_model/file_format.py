"""Detection of a file's format from its bytes, before parsing: complete or truncated ONNX, or something else. Pure."""

from __future__ import annotations

from typing import Final

from onnx import ModelProto

# First bytes of other formats: offset, bytes, description.
_MAGIC: Final = (
    (0, b"PK\x03\x04", "a zip archive, as PyTorch, Keras and numpy write them"),
    (0, b"PK\x05\x06", "an empty zip archive"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes them"),
    (0, b"\x1f\x8b", "a gzip archive"),
    (257, b"ustar", "a tar archive"),
    (4, b"TFL3", "a TensorFlow Lite model"),
    (4, b"ORTM", "a model in ONNX Runtime's own format"),
    (0, b"GGUF", "a GGUF file"),
    (0, b"ftrt", "a TensorRT engine"),
    (0, b"\x93NUMPY", "a numpy array"),
    (0, b"\x7fELF", "a program or shared library"),
    (0, b"version https://git-lfs", "a Git LFS pointer instead of the file itself"),
)
_PICKLES: Final = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))


def other_kind(data: bytes) -> str | None:
    """Describe the format of `data` if its first bytes show that it is not ONNX."""
    if data[:2] in _PICKLES:
        return "a pickle, which is a program and never loaded here"
    for offset, magic, words in _MAGIC:
        if data[offset : offset + len(magic)] == magic:
            return words
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") < len(data):
        return "a safetensors file, which holds weights without a graph"
    start = data[:64].lstrip()
    if start[:1] in (b"{", b"[", b"<") and data[:256].isascii() and b"\0" not in data[:256]:
        return "text, such as JSON or HTML"
    return None


def missing_bytes(data: bytes) -> int | None:
    """Return how many bytes the outermost fields extend past the end: 0 for a complete file, None if it has no such
    fields."""
    view, position = memoryview(data), 0
    while position < len(view):
        is_first = position == 0
        key, position = _varint(view, position)
        field, wire = key >> 3, key & 7
        known = field in ModelProto.DESCRIPTOR.fields_by_number
        if wire not in (0, 1, 2, 5) or (not known and (is_first or field > 100)):
            return None
        if wire == 2:
            size, position = _varint(view, position)
            position += size
        else:
            position = _varint(view, position)[1] if wire == 0 else position + (8 if wire == 1 else 4)
    return position - len(view)


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    """Return a number and its end position; past the end of `view` if it is truncated or invalid."""
    value = 0
    for index in range(10):
        if position + index >= len(view):
            return 0, len(view) + 1
        byte = view[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    return 0, len(view) + 1
