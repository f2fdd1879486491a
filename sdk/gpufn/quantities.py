"""Numbers and sizes of memory, as options and settings give them. What is none raises InvalidSpec."""

from __future__ import annotations

import re

from gpufn.errors import InvalidSpec
from gpufn.protocol.limits import LARGEST_INTEGER

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(Ki|Mi|Gi|Ti|k|M|G|T)?B?")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def parse_bytes(quantity: str | int) -> int:
    """Bytes of `"2Gi"`, `"500M"` or a number. Raises InvalidSpec.

    >>> parse_bytes("1.5Gi"), parse_bytes("500 MB")
    (1610612736, 500000000)
    """
    if isinstance(quantity, bool) or not isinstance(quantity, (int, str)):
        raise InvalidSpec(f"a memory size is a number of bytes or text such as '2Gi', not {quantity!r}")
    if isinstance(quantity, int):
        amount = quantity
    else:
        match = _QUANTITY.fullmatch(quantity.strip())
        if match is None:
            raise InvalidSpec(f"{quantity!r} is not a memory size; write for example '512Mi' or '2Gi'")
        amount = int(min(float(match[1]) * _UNITS[match[2] or ""], LARGEST_INTEGER + 1))
    if amount <= 0:
        raise InvalidSpec(f"a memory size is positive, not {quantity!r}")
    if amount > LARGEST_INTEGER:
        raise InvalidSpec(f"a memory size is less than 8 EiB, not {quantity!r}")
    return amount


def check_number(option: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidSpec(f"{option} is a number from {low:g} to {high:.10g}, not {value!r}")


def check_whole(option: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidSpec(f"{option} is a whole number from {low} to {high}, not {value!r}")
