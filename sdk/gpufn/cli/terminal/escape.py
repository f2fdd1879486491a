"""Names, messages and logs as a terminal may have them: what it would obey, or read backwards, is spelled out.

Whoever may write a log line or name a key could otherwise clear an administrator's screen, set its title, or have it
type. Pure.
"""

from __future__ import annotations

import re
from typing import Final

# Control characters but for newline and tab, halves of characters, and what turns the direction of a line.
_OBEYED: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
_COLOURS: Final = re.compile(r"\x1b\[[0-9;:]*m")


def visible(text: str) -> str:
    r"""Without colours, and the rest as Python writes it.

    >>> print(visible("\x1b[31mred\x1b[0m \x1b]0;title\x07"))
    red \x1b]0;title\x07
    """
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], _COLOURS.sub("", text))


def in_one_line(text: str) -> str:
    r"""
    >>> in_one_line("one\ntwo")
    'one two'
    """
    return visible(" ".join(text.splitlines()))


def visible_json(text: str) -> str:
    r"""The same JSON; its own newlines stay.

    >>> print(visible_json('{"x": "\x9b31m"}'))
    {"x": "\u009b31m"}
    """
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
