"""Commands that configure networks: `ip`, `nft`, `iptables`."""

from __future__ import annotations

import subprocess
from typing import Final

_WITHIN_S: Final = 30


def run(*command: str, given: str = "") -> str:
    return subprocess.run(  # noqa: S603
        command, input=given, capture_output=True, text=True, timeout=_WITHIN_S, check=True
    ).stdout


def succeeds(*command: str) -> bool:
    try:
        run(*command)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        told = (error.stderr or "").strip().splitlines()
        return f"{' '.join(error.cmd)}: {told[0] if told else f'exit code {error.returncode}'}"
    return str(error)
