"""The layout of a safetensors file: 8 bytes with the length of the header, the header in JSON, then the tensors.

A file that was cut short loads without an error in programs that map it, and fails at the first read behind its end.
"""

from __future__ import annotations

from typing import BinaryIO

import msgspec

SUFFIX = ".safetensors"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def damage_of(file: BinaryIO, size: int) -> str | None:
    """Return why `file`, which has `size` bytes, is not a complete safetensors file; None if it is one.

    >>> import io
    >>> header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    >>> whole = len(header).to_bytes(8, "little") + header + bytes(8)
    >>> damage_of(io.BytesIO(whole), len(whole))
    >>> damage_of(io.BytesIO(whole[:-1]), len(whole) - 1)
    'its header describes 77 bytes, and it has 76'
    """
    if size < _LENGTH_BYTES:
        return f"it has {size} bytes, too few for the length of a header"
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > _MAX_HEADER_BYTES:
        return f"its header would have {length:,} bytes, more than the {_MAX_HEADER_BYTES:,} allowed"
    if _LENGTH_BYTES + length > size:
        return f"its header has {length:,} bytes, and the file ends after {size:,}"
    try:
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        spans = [
            msgspec.json.decode(entry, type=_Tensor).data_offsets
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except msgspec.DecodeError as error:
        return f"its header is not valid: {error}"
    end = 0
    for begin, tensor_end in sorted(spans):
        if begin != end or tensor_end < begin:
            return f"its tensors leave a gap or overlap at byte {begin:,} of the data"
        end = tensor_end
    if _LENGTH_BYTES + length + end != size:
        return f"its header describes {_LENGTH_BYTES + length + end:,} bytes, and it has {size:,}"
    return None
