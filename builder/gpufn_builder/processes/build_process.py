"""One build, in a process of its own: what it imports and does can neither grow nor kill the service that starts it."""

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
        lambda request, tell: Pipeline(request, tell, environ=os.environ, clock=time.monotonic, now=time.time).run(),
    )


if __name__ == "__main__":
    sys.exit(main())
