"""The rehearsal of a start, in a process of its own: it must leave nothing for the user's code to see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import gc, logging, os, resource, sys, threading
from gpufn_runtime.worker import template
from gpufn_runtime.worker.rehearsal.rehearse import rehearse

def state():
    return {
        "environ": dict(os.environ), "path": list(sys.path), "modules": set(sys.modules), "folder": os.getcwd(),
        "finders": set(sys.path_importer_cache), "streams": (sys.stdout, sys.stderr), "last": logging.lastResort,
        "threads": threading.enumerate(), "files": sorted(os.listdir("/proc/self/fd")),
    }

template.import_all([])
template.prepare_decoders()
before = state()
rehearse()
after = state()
print([name for name in before if before[name] != after[name]], "gpufn_rehearsal" in sys.modules)
"""


def test_a_rehearsal_leaves_no_trace(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, cwd=tmp_path, capture_output=True, text=True
    )
    assert (completed.stdout.strip(), completed.stderr) == ("[] False", "")
