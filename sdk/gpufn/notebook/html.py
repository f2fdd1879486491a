"""HTML of tables and progress bars for notebooks. All texts are escaped: names and errors come from users. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_LEFT = 'style="text-align: left; white-space: pre-wrap"'


def fields(title: str, pairs: Iterable[tuple[str, Any]]) -> str:
    """Return a table of names and values, without the values None and "".

    >>> table = fields("f@1", [("workers", 2), ("reason", ""), ("error", "<b>")])
    >>> table.count("<tr>"), "&lt;b&gt;" in table
    (2, True)
    """
    shown = ((name, value) for name, value in pairs if value not in (None, ""))
    rows = "".join(
        f"<tr><th {_LEFT}>{_escape(name)}</th><td {_LEFT}>{_escape(str(value))}</td></tr>" for name, value in shown
    )
    return f"<table><caption {_LEFT}>{_escape(title)}</caption><tbody>{rows}</tbody></table>"


def rows(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return a table with a header.

    >>> rows(["name"], [["<f>"]]).endswith("&lt;f&gt;</td></tr></tbody></table>")
    True
    """
    head = "".join(f"<th {_LEFT}>{_escape(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td {_LEFT}>{_escape(str(value))}</td>' for value in line)}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def line(text: str) -> str:
    return f"<em>{_escape(text)}</em>"


def progress(label: str, done: int, total: int | None, note: str = "") -> str:
    """Return a progress bar; without a total, a count.

    >>> progress("f", 3, None, "a <limit>")
    'f 3 (a &lt;limit&gt;)'
    """
    text = _escape(plain_progress(label, done, total, note))
    return text if total is None else f'<progress value="{done}" max="{max(total, 1)}"></progress> {text}'


def plain_progress(label: str, done: int, total: int | None, note: str = "") -> str:
    """
    >>> plain_progress("f", 3, 1000)
    'f 3/1,000'
    """
    of = "" if total is None else f"/{total:,}"
    return f"{label} {done:,}{of}" + (f" ({note})" if note else "")


def _escape(text: str) -> str:
    import html  # noqa: PLC0415  1 ms of each command, which needs no HTML

    return html.escape(text)
