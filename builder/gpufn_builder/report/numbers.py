"""Formatting of numbers for a page. Pure."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """
    >>> duration(0.00123), duration(90.0), duration(0.0)
    ('1.23 ms', '90 s', '0')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{number(seconds / size)} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def small(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "∞"
