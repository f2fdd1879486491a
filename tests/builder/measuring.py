"""A build process that reports that it compiles, or that it measures until the file `measured` exists, if the model's
`max_batch` is 2."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from gpufn_builder.processes.process import ReportProgress, serve
from gpufn_builder.processes.process_messages import BuildRequest, BuildResult
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed


def work(request: BuildRequest, report_progress: ReportProgress) -> msgspec.Struct:
    if request.spec.max_batch == 2:
        report_progress(BuildStage.MEASURE, 0.6, "tensorrt")
        while not (Path(request.caches) / "measured").exists():
            time.sleep(0.01)
    report_progress(BuildStage.COMPILE, 0.2, str(os.getpid()))
    while request.spec.max_batch == 1:
        time.sleep(60)
    return BuildResult(error=BuildFailed("it only measured").info())


if __name__ == "__main__":
    sys.exit(serve(BuildRequest, work))
