"""Move this process's memory into pages of 2 MiB instead of 4 KiB. An engine on the CPU reads all its weights in each
run, and the CPU's TLB holds only one or two thousand pages (decision 0026).

Linux can do this for existing memory (``madvise`` with ``MADV_COLLAPSE``, since 6.1). With an older kernel, or if the
operator has disabled huge pages, nothing changes.
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
    """Move used memory into huge pages, at about 1 ms per page, without blocking other threads. Returns the number of
    bytes in huge pages."""
    try:
        if "[never]" in _ENABLED.read_text():
            return 0
        with _SMAPS.open() as lines:
            areas = list(dense_ranges(lines))
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # not Linux
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    pages = (page for area in areas for page in range(area.start, area.stop, HUGE_BYTES))
    moved = [page for page in pages if madvise(page, HUGE_BYTES, _MADV_COLLAPSE) == 0]
    return HUGE_BYTES * len(moved)


def dense_ranges(smaps: Iterable[str]) -> Iterator[range]:
    """Yield the address ranges of whole huge pages in anonymous memory that is mostly used. For memory that is hardly
    used, such as a thread's stack, a huge page would only cost more.

    >>> list(dense_ranges(["00200000-00800000 rw-p 00000000 00:00 0 \\n", "Size: 6144 kB\\n", "Rss: 6000 kB\\n"]))
    [range(2097152, 8388608)]
    """
    area = range(0)
    for line in smaps:
        words = line.split()
        if words[0] == "Rss:":
            if len(area) <= 2 * int(words[1]) * 1024:
                first, end = -(-area.start // HUGE_BYTES) * HUGE_BYTES, area.stop // HUGE_BYTES * HUGE_BYTES
                if first < end:
                    yield range(first, end)
        elif not words[0].endswith(":"):
            begin, _, stop = words[0].partition("-")
            is_ours = words[1] == "rw-p" and words[5:] in ([], ["[heap]"])
            area = range(int(begin, 16), int(stop, 16)) if is_ours else range(0)
