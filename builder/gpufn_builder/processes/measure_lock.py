"""The lock of a builder's node for measurements. Builds compile side by side, but measure one after the other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from gpufn_platform.process.file_lock import lock_file

_POLL_S: Final = 0.2


@contextlib.contextmanager
def measuring_alone(
    folder: Path, on_wait: Callable[[], None], sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Hold the lock, a file in `folder`. It is one for all devices, because all builds need the CPU. `on_wait()` is
    called again and again while another process holds it: waiting is progress. The holder must make progress itself, or
    it is killed, and the kernel frees the lock.

    If the disk takes no file, the measurement runs without the lock.
    """
    path = folder / "measuring.lock"
    lock = None
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        while lock is None:
            try:
                lock = lock_file(path)
            except BlockingIOError:
                on_wait()
                sleep(_POLL_S)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
