"""What a program answers, word by word: for who reads the report and has no such machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence

_SHOWN = 8_000  # characters, the last ones


def heard(
    command: Sequence[str], question: str = "", *, environ: Mapping[str, str] | None = None, timeout_s: float = 10.0
) -> str:
    """What it printed, how it ended and how long that took. Never raises.

    >>> heard(["sh", "-c", "echo yes; exit 3"]).splitlines()[0], heard(["not-there"])
    ('yes', 'not-there cannot be run: No such file or directory')
    """
    began = time.monotonic()
    try:
        ended = subprocess.run(
            command,
            env=environ,
            input=f"{question}\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        return f"{printed[-_SHOWN:]}[no end after {timeout_s:g} s]"
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"
    return f"{ended.stdout[-_SHOWN:]}[exit code {ended.returncode}, {time.monotonic() - began:.2f} s]"


def of_all(commands: Sequence[str]) -> dict[str, str]:
    """By command, for a shell."""
    return {command: heard(["sh", "-c", command]) for command in commands}
