"""The process of one build. Its imports do not add to the service's memory, and its failures do not end the service."""

from __future__ import annotations

import os
import sys
import time

from gpufn_builder.pipeline import Pipeline
from gpufn_builder.processes.process import serve
from gpufn_builder.processes.process_messages import BuildRequest


def main() -> int:
    return serve(
        BuildRequest,
        lambda request, report_progress: Pipeline(
            request, report_progress, environ=os.environ, clock=time.monotonic, now=time.time
        ).run(),
    )


if __name__ == "__main__":
    sys.exit(main())
