"""Run a command in this process; a gateway's view of a function."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from gpufn.cli import app

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


def command(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(app, arguments, **options)
