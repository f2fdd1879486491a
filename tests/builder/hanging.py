"""A build process that reports progress once and then hangs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from gpufn_builder.processes.process import ReportProgress, serve
from gpufn_builder.processes.process_messages import BuildRequest
from gpufn_core.domain.devices.engine import BuildStage


def work(request: BuildRequest, tell: ReportProgress) -> msgspec.Struct:
    tell(BuildStage.INGEST, 0.01, f"in {Path(request.folder).name}")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    sys.exit(serve(BuildRequest, work))
