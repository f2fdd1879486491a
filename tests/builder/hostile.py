"""A build process that a hostile model has taken over: it runs the attacks that a test wrote to the caches' folder."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from pathlib import Path

import msgspec

from gpufn_builder.processes.process import ReportProgress, serve
from gpufn_builder.processes.process_messages import BuildRequest
from gpufn_core.errors import BuildFailed
from tests.e2e.apps.attacks import attempt

ATTACKS, OUTCOMES, ESCAPED = "attacks.json", "outcomes.json", "escaped"


def escape(file: Path) -> None:
    """Leave the process group and the parent, in a process that waits for ever. It locks `file`, which has its pid: in
    a PID namespace that is no number of the machine."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            held = file.open("w")
            fcntl.flock(held, fcntl.LOCK_EX)
            held.write(str(os.getpid()))
            held.flush()
            os.write(writer, b"1")
            while True:
                signal.pause()
        os._exit(0)
    os.read(reader, 1)


def work(request: BuildRequest, tell: ReportProgress) -> msgspec.Struct:
    caches = Path(request.caches)
    escape(caches / ESCAPED)
    codes = json.loads((caches / ATTACKS).read_bytes())
    (caches / OUTCOMES).write_text(json.dumps({name: attempt(code) for name, code in codes.items()}, default=repr))
    raise BuildFailed("attacked")


if __name__ == "__main__":
    sys.exit(serve(BuildRequest, work))
