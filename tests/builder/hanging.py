"""A build's process that says that it is there, then does nothing more."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from gpufn.engine import BuildStage
from gpufn_builder.exchange import BuildRequest
from gpufn_builder.process import Tell, serve


def work(request: BuildRequest, tell: Tell) -> msgspec.Struct:
    tell(BuildStage.INGEST, 0.01, f"in {Path(request.folder).name}")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(serve(BuildRequest, work))
