"""The files and removals that the next commit of a worker publishes."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

_drafts: dict[str, Draft] = {}
_making = threading.Lock()


class Draft:
    """A folder with the files to add, and the paths to remove."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpufn-volume-"))
        self.removed: list[str] = []
        self.lock = threading.Lock()  # one commit at a time

    def empty(self) -> None:
        self.removed.clear()
        for entry in os.scandir(self.folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def draft_of(name: str) -> Draft:
    """Return the draft of a volume in this process."""
    with _making:
        if name not in _drafts:
            _drafts[name] = Draft()
        return _drafts[name]
