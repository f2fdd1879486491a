"""A real S3 server for tests: `rclone serve s3`, on a folder."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import missing

KEY, SECRET = "a-key", "a-secret"
_LISTENS = re.compile(r"http://127\.0\.0\.1:(\d+)/")


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """Serve the folders in `folder` as buckets. Yields the variables of AWS for clients."""
    program = shutil.which("rclone")
    if program is None:
        missing("rclone is not installed")
    # Without the cache of folders: a list could have other times than the object itself.
    uncached = ("--vfs-cache-mode=off", "--dir-cache-time=0s")
    command = [program, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", f"{KEY},{SECRET}", *uncached]
    environ = {"HOME": os.fspath(folder.parent), "PATH": os.environ["PATH"]}
    with subprocess.Popen([*command, os.fspath(folder)], stderr=subprocess.PIPE, text=True, env=environ) as server:
        try:
            assert server.stderr is not None
            port = next(match[1] for line in server.stderr if (match := _LISTENS.search(line)))
            yield {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
            }
        finally:
            server.kill()
