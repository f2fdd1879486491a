"""Verbatim output of programs, for readers of the report who have no such machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence

_SHOWN = 8_000  # characters, the last ones


def output_of(
    command: Sequence[str], stdin: str = "", *, environ: Mapping[str, str] | None = None, timeout_s: float = 10.0
) -> str:
    """Run a command and return its output, how it ended and how long it took. Never raises.

    >>> output_of(["sh", "-c", "echo yes; exit 3"]).splitlines()[0], output_of(["not-there"])
    ('yes', 'not-there cannot be run: No such file or directory')
    """
    started = time.monotonic()
    try:
        completed = subprocess.run(
            command,
            env=environ,
            input=f"{stdin}\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return f"{printed[-_SHOWN:]}[not finished after {timeout_s:g} s]"
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"
    return f"{completed.stdout[-_SHOWN:]}[exit code {completed.returncode}, {time.monotonic() - started:.2f} s]"


def outputs_of(commands: Sequence[str]) -> dict[str, str]:
    """Run shell commands and return their outputs, by command."""
    return {command: output_of(["sh", "-c", command]) for command in commands}
