"""Escaping of control and text-direction characters in names, messages and logs, before they reach a terminal. Pure.

Otherwise the author of a log line or a key's label could clear an administrator's screen, set the window title, or
inject input.
"""

from __future__ import annotations

import re
from typing import Final

# Control characters except newline and tab, surrogates, and bidirectional formatting characters.
_UNSAFE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
_COLORS: Final = re.compile(r"\x1b\[[0-9;:]*m")


def visible(text: str) -> str:
    r"""Remove colors, and escape other unsafe characters as Python does.

    >>> print(visible("\x1b[31mred\x1b[0m \x1b]0;title\x07"))
    red \x1b]0;title\x07
    """
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], _COLORS.sub("", text))


def in_one_line(text: str) -> str:
    r"""
    >>> in_one_line("one\ntwo")
    'one two'
    """
    return visible(" ".join(text.splitlines()))


def visible_json(text: str) -> str:
    r"""Escape unsafe characters in JSON without changing its value. Newlines of the layout stay.

    >>> print(visible_json('{"x": "\x9b31m"}'))
    {"x": "\u009b31m"}
    """
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
