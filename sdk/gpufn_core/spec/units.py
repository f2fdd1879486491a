"""Validation of numbers and memory sizes in options and settings. Raises InvalidSpec for an invalid value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from gpufn_core.errors import InvalidSpec
from gpufn_core.protocol.limits import LARGEST_INTEGER

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(Ki|Mi|Gi|Ti|k|M|G|T)?B?")
# A worker without further imports uses 22 MiB; a fork of a template process shares a part of them.
MIN_PROCESS_BYTES = 16 << 20
_LARGEST_WITHOUT_UNIT = 1 << 20  # a smaller number of bytes was probably meant as MiB
_UNITS_OF_TIME = {"s": "seconds", "ms": "milliseconds"}
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class Bounds(NamedTuple):
    """The least and the largest value of a number. `option` is the name that users see."""

    option: str
    low: float
    high: float
    is_whole: bool = False
    may_be_none: bool = False

    def check(self, value: float | None, unit: str = "") -> None:
        """Raise InvalidSpec if `value` is out of bounds."""
        if value is None and self.may_be_none:
            return
        kinds, what = ((int,), "whole number") if self.is_whole else ((int, float), "number")
        if isinstance(value, bool) or not isinstance(value, kinds) or not self.low <= value <= self.high:
            of_unit = f" of {unit}" if unit else ""
            raise InvalidSpec(
                f"{self.option} is a {what}{of_unit} from {self.low:g} to {self.high:.10g}, not {value!r}"
            )


def check_fields(owner: object, bounds: Mapping[str, Bounds]) -> None:
    """Check the fields of `owner` that are set; `bounds` is keyed by field, whose name ends in its unit. Raises
    InvalidSpec."""
    for field, each in bounds.items():
        if (value := getattr(owner, field)) is not msgspec.UNSET:
            each.check(value, _UNITS_OF_TIME.get(field.rpartition("_")[2], ""))


def parse_bytes(quantity: str | int) -> int:
    """Return the bytes of `"2Gi"`, `"500M"` or a number. Raises InvalidSpec.

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


def format_bytes(count: float) -> str:
    """Format with the largest unit that fits; a negative count is 0.

    >>> [format_bytes(each) for each in (-1, 120, 1590, 7_864_320, 46_820_000, 5 << 30, 3 << 50)]
    ['0 B', '120 B', '1.553 KiB', '7.5 MiB', '44.65 MiB', '5 GiB', '3072 TiB']
    """
    amount = max(count, 0)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def format_duration(seconds: float) -> str:
    """Format with three digits; minutes are whole.

    >>> [format_duration(each) for each in (0, 0.000_15, 0.0123, 0.9996, 3.25, 119.4)]
    ['0 s', '150 µs', '12.3 ms', '1 s', '3.25 s', '119 s']
    >>> [format_duration(each) for each in (119.96, 139, 9000, 200_000)]
    ['2 min', '2 min', '2.5 h', '2.3 days']
    """
    if 0 < seconds < 0.000_999_5:
        return f"{seconds * 1e6:.3g} µs"
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 119.5:
        return f"{seconds:.3g} s"
    if seconds < 7170:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.3g} h" if seconds < 172_800 else f"{seconds / 86_400:.2g} days"


def format_money(amount: float) -> str:
    """Format without a currency and without an exponent: two decimals, or two digits of an amount below 0.1.

    >>> [format_money(each) for each in (0, 1e-06, 2.9167e-08, 0.0995, 0.5, 1234.567, -0.002)]
    ['0', '0.0000010', '0.000000029', '0.10', '0.50', '1,234.57', '-0.0020']
    """
    if not amount:
        return "0"
    decimals = 2 if abs(amount) >= 0.0995 else 1 - math.floor(math.log10(abs(amount)))
    return f"{amount:,.{decimals}f}"


def check_least_bytes(option: str, amount: int, least: int, needed_by: str) -> None:
    """Reject a size that is too small to work, and suggest a unit if the number lacks one. Raises InvalidSpec.

    >>> check_least_bytes("memory", 512, MIN_PROCESS_BYTES, "a Python process")
    Traceback (most recent call last):
    gpufn.errors.InvalidSpec: memory is 512 bytes, and a Python process needs at least 16 MiB: write memory='512Mi'
    """
    if amount >= least:
        return
    suggested = amount if least >> 20 <= amount <= _LARGEST_WITHOUT_UNIT else max(512, least >> 20)
    raise InvalidSpec(
        f"{option} is {amount:,} bytes, and {needed_by} needs at least {format_bytes(least)}: "
        f"write {option}='{suggested}Mi'"
    )
