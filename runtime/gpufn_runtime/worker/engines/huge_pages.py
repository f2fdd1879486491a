"""The memory of this process in pages of 2 MiB instead of 4 KiB: an engine on the CPU reads all its weights in each
run, and the processor keeps the addresses of a thousand pages or two (decision 0026).

Linux does it for memory that is there already (``madvise`` with ``MADV_COLLAPSE``, from 6.1 on). An older kernel, and
one whose operator wants no huge pages, leave all as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

HUGE_BYTES: Final = 2 << 20

_MADV_COLLAPSE: Final = 25
_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SMAPS: Final = Path("/proc/self/smaps")


def collapse() -> int:
    """Move what is in use into huge pages: about 1 ms for each, in which other threads go on. How many bytes are in one
    now."""
    try:
        if "[never]" in _ENABLED.read_text():
            return 0
        with _SMAPS.open() as lines:
            areas = list(dense(lines))
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # no Linux
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    pages = (page for area in areas for page in range(area.start, area.stop, HUGE_BYTES))
    moved = [page for page in pages if madvise(page, HUGE_BYTES, _MADV_COLLAPSE) == 0]
    return HUGE_BYTES * len(moved)


def dense(smaps: Iterable[str]) -> Iterator[range]:
    """The addresses of whole huge pages in anonymous memory that is used for the most part: of what is hardly used,
    such as a thread's stack, a huge page would only take more.

    >>> list(dense(["00200000-00800000 rw-p 00000000 00:00 0 \\n", "Size: 6144 kB\\n", "Rss: 6000 kB\\n"]))
    [range(2097152, 8388608)]
    """
    found = range(0)
    for line in smaps:
        words = line.split()
        if words[0] == "Rss:":
            if len(found) <= 2 * int(words[1]) * 1024:
                first, end = -(-found.start // HUGE_BYTES) * HUGE_BYTES, found.stop // HUGE_BYTES * HUGE_BYTES
                if first < end:
                    yield range(first, end)
        elif not words[0].endswith(":"):
            begin, _, stop = words[0].partition("-")
            is_ours = words[1] == "rw-p" and words[5:] in ([], ["[heap]"])
            found = range(int(begin, 16), int(stop, 16)) if is_ours else range(0)
