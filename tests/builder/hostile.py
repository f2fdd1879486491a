"""A build process that a hostile model has taken over: it runs the attacks that a test wrote to the caches' folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from gpufn_builder.processes.process import ReportProgress, serve
from gpufn_builder.processes.process_messages import BuildRequest
from gpufn_core.errors import BuildFailed
from tests.e2e.apps.attacks import attempt

ATTACKS, OUTCOMES = "attacks.json", "outcomes.json"


def work(request: BuildRequest, tell: ReportProgress) -> msgspec.Struct:
    caches = Path(request.caches)
    codes = json.loads((caches / ATTACKS).read_bytes())
    (caches / OUTCOMES).write_text(json.dumps({name: attempt(code) for name, code in codes.items()}))
    raise BuildFailed("attacked")


if __name__ == "__main__":
    sys.exit(serve(BuildRequest, work))
