"""Formatting of numbers for a page. Pure."""

from __future__ import annotations

import math


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def small(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "∞"
