"""A function that records its starts and ends, so that tests compare them with the platform's records."""

from __future__ import annotations

import json
import os
import time
import uuid

from gpufn import current, gpu_function

PROCESS = uuid.uuid4().hex  # pids in different PID namespaces are not different


def note(path: str, what: str) -> None:
    """Append a line in one write, which a kill cannot split."""
    call = current()
    line = {
        "call": call.invocation, "attempt": call.attempt, "what": what, "at": time.time(), "process": PROCESS,
    }  # fmt: skip
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, json.dumps(line).encode() + b"\n")
    os.close(descriptor)


@gpu_function(max_workers=1, concurrency=2, idle_timeout=60, timeout=120)
def long(path: str, seconds: float) -> str:
    """The second start of a call is short, so that a test need not wait for it."""
    note(path, "start")
    time.sleep(seconds if current().attempt == 1 else 0)
    note(path, "end")
    return f"attempt {current().attempt}"
