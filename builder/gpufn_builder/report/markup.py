"""HTML elements, and formatting of numbers for a page.

The content of a page comes from an untrusted model, so `tag` escapes everything that is not Html.
"""

from __future__ import annotations

import html
import math


class Html(str):
    """Text that is already markup."""

    __slots__ = ()


def tag(element: str, /, *content: str, cls: str = "", **attributes: object) -> Html:
    """Build an element. Content that is not Html is escaped, and so are attributes; `_` in their names becomes `-`."""
    pairs = ({"class": cls} if cls else {}) | {key.replace("_", "-"): value for key, value in attributes.items()}
    inside = "".join(part if isinstance(part, Html) else html.escape(part) for part in content)
    rendered = "".join(f' {key}="{html.escape(str(value))}"' for key, value in pairs.items())
    return Html(f"<{element}{rendered}>" if element == "meta" else f"<{element}{rendered}>{inside}</{element}>")


def duration(seconds: float) -> str:
    """
    >>> duration(0.00123), duration(90.0), duration(0.0)
    ('1.23 ms', '90 s', '0')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{number(seconds / size)} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0"


def size(count: int) -> str:
    """
    >>> size(1590), size(46_820_000), size(120)
    ('1.59 kB', '46.8 MB', '120 B')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{number(count / factor)} {unit}"
    return f"{count} B"


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def small(value: float | None) -> str:
    return "∞" if value is None or not math.isfinite(value) else f"{value:.2g}"
