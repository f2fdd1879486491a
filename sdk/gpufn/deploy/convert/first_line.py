"""An exception of a converter as one line."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    r"""Return the type of an exception, and the first line of its message.

    >>> first_line(ValueError("\nno input\nsee the log")), first_line(EOFError())
    ('ValueError: no input', 'EOFError')
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
