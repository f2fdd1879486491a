"""Run a command in this process; a gateway's view of a function."""

from __future__ import annotations

import os
import re
from typing import Any

from click.testing import CliRunner, Result

from gpufn.cli import app
from tests.gateway.auth.access_table import COMMANDS
from tests.sdk.conftest import STUBS

VIEW: dict[str, Any] = {
    "name": "f",
    "active": 3,
    "serving": 2,
    "latest": 3,
    "updated_at": 1.0,
    "min_workers": None,
    "max_workers": 8,
    "spec": {
        "name": "f",
        "entry": {"module": "app", "qualname": "f"},
        "methods": [{"name": "", "parameters": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}}],
        "scaling": {"min_workers": 0, "max_workers": 4},
        "resources": {"gpu": ["L4"], "share": "time", "cpu": 1.0, "memory_bytes": 1 << 30},
    },
    "workers": {"ready": 2, "starting": 1, "draining": 0, "parking": 0, "parked": 0, "resuming": 0},
    "queued": None,
    "running": 1,
    "wanted": 3,
    "reason": "1 running: 3 workers",
    "waiting": {"reason": "no_capacity", "detail": "no GPU is free", "eta_s": None},
}
APP = {"app.py": "from gpufn import gpu_function\n@gpu_function\ndef f(x: int) -> int: return x\n"}


# Every command may look for a similar name, if the key may read names.
_SUGGESTIONS = ("GET /v1/auth/me", "GET /v1/functions")


def command(*arguments: str, **options: Any) -> Result:
    """Run a command, and check that the table of access has its requests."""
    stub = STUBS.get(os.environ.get("GPUFN_URL", ""))
    before = len(stub.requests) if stub else 0
    result = CliRunner().invoke(app, arguments, **options)
    name = next((name for name in (" ".join(arguments[:2]), *arguments[:1]) if name in COMMANDS), None)
    if stub is not None and name is not None:
        patterns = [re.sub(r"{\w+}", "[^?]+", route) for route in (*_SUGGESTIONS, *COMMANDS[name])]
        sent = {f"{each.method} {each.path.partition('?')[0]}" for each in stub.requests[before:]}
        unlisted = {each for each in sent if not any(re.fullmatch(pattern, each) for pattern in patterns)}
        assert not unlisted, f"access_table.COMMANDS[{name!r}] lacks {unlisted}"
    return result
