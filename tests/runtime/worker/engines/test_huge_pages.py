"""Used memory moves into huge pages, unless the machine's operator has disabled them."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import pytest

from gpufn_runtime.worker.engines import huge_pages
from gpufn_runtime.worker.engines.huge_pages import HUGE_BYTES, dense_ranges

_PAGE = 4096
_AREA = """\
{area} {permissions} 00000000 00:00 0 {name}
Size:              {size} kB
KernelPageSize:        4 kB
Rss:               {rss} kB
Pss:                   0 kB
VmFlags: rd wr mr mw me ac
"""


def _smaps(start: int, stop: int, *, rss: int, permissions: str = "rw-p", name: str = "") -> list[str]:
    text = _AREA.format(
        area=f"{start:08x}-{stop:08x}", permissions=permissions, name=name, size=(stop - start) // 1024, rss=rss // 1024
    )
    return text.splitlines(keepends=True)


def test_areas_are_cut_to_whole_huge_pages() -> None:
    start, stop = 3 * HUGE_BYTES - _PAGE, 6 * HUGE_BYTES + _PAGE
    assert list(dense_ranges(_smaps(start, stop, rss=stop - start))) == [range(3 * HUGE_BYTES, 6 * HUGE_BYTES)]
    assert list(dense_ranges(_smaps(start, 4 * HUGE_BYTES - _PAGE, rss=HUGE_BYTES))) == []


@pytest.mark.parametrize(
    ("rss", "permissions", "name", "is_taken"),
    [
        (2 * HUGE_BYTES, "rw-p", "", True),
        (2 * HUGE_BYTES, "rw-p", "[heap]", True),
        (2 * HUGE_BYTES - _PAGE, "rw-p", "", False),  # a thread's stack
        (4 * HUGE_BYTES, "rw-p", "/usr/lib/libm.so.6", False),
        (4 * HUGE_BYTES, "rw-s", "", False),
        (4 * HUGE_BYTES, "r-xp", "", False),
    ],
)
def test_anonymous_memory_that_is_used_for_the_most_part(rss: int, permissions: str, name: str, is_taken: bool) -> None:
    area = range(4 * HUGE_BYTES, 8 * HUGE_BYTES)
    others = _smaps(0, HUGE_BYTES, rss=0), _smaps(9 * HUGE_BYTES, 10 * HUGE_BYTES, rss=0)
    lines = [*others[0], *_smaps(area.start, area.stop, rss=rss, permissions=permissions, name=name), *others[1]]
    assert list(dense_ranges(lines)) == ([area] if is_taken else [])


def _huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


def _can_collapse() -> bool:
    major, minor = (int(number) for number in platform.release().split(".")[:2])
    enabled = huge_pages._ENABLED
    return (major, minor) >= (6, 1) and enabled.exists() and "[never]" not in enabled.read_text()


def test_what_is_there_is_moved_and_keeps_its_content() -> None:
    if not _can_collapse():
        pytest.skip("the kernel has no MADV_COLLAPSE or no huge pages, or is told to have none")
    size = 16 * HUGE_BYTES
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(0, size, _PAGE):
            memory[page] = page // _PAGE % 251
        before = _huge_bytes()
        memory.madvise(mmap.MADV_HUGEPAGE)
        assert huge_pages.collapse() >= size - 2 * HUGE_BYTES
        assert _huge_bytes() - before >= size - 2 * HUGE_BYTES
        assert all(memory[page] == page // _PAGE % 251 for page in range(0, size, _PAGE))


def test_an_operator_who_wants_none_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = tmp_path / "enabled"
    enabled.write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "_ENABLED", enabled)
    assert huge_pages.collapse() == 0
    monkeypatch.setattr(huge_pages, "_ENABLED", tmp_path / "no Linux")
    assert huge_pages.collapse() == 0
