"""A build process that hangs if the model's `max_batch` is 2, and otherwise builds."""

from __future__ import annotations

import os
import sys
import time

import msgspec

from gpufn_builder.pipeline import Pipeline
from gpufn_builder.processes.process import ReportProgress, serve
from gpufn_builder.processes.process_messages import BuildRequest
from tests.builder import hanging


def work(request: BuildRequest, report_progress: ReportProgress) -> msgspec.Struct:
    if request.spec.max_batch == 2:
        return hanging.work(request, report_progress)
    return Pipeline(request, report_progress, environ=os.environ, clock=time.monotonic, now=time.time).run()


if __name__ == "__main__":
    sys.exit(serve(BuildRequest, work))
