"""What the end of a child process means."""

from __future__ import annotations

import signal

import pytest

from gpufn_builder.processes.process_end import describe_exit

LIMIT = 40 << 20


@pytest.mark.parametrize(
    ("code", "output", "limit", "words"),
    [
        (1, "MemoryError", LIMIT, "needs more memory than its limit of 40 MiB"),
        (-signal.SIGSEGV, "", LIMIT, "needs more memory than its limit of 40 MiB"),  # malloc failed in a C library
        (-signal.SIGSEGV, "", None, "was killed by SIGSEGV"),
        (-signal.SIGKILL, "", LIMIT, "was killed by SIGKILL"),
        (3, "first\nlast", LIMIT, "ended with code 3: last"),
    ],
)
def test_an_end_names_its_cause(code: int, output: str, limit: int | None, words: str) -> None:
    assert describe_exit(code, output, limit).endswith(words)
