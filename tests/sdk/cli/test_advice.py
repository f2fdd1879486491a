"""`gpufn advise`: what the figures lead to."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn.cli.functions.advice import Seen, advise, replay
from gpufn.cli.functions.history import sparkline

_SPEC: dict[str, Any] = {
    "resources": {"gpu": [], "share": "exclusive", "gpu_count": 1, "memory_bytes": 8 << 30, "vram_bytes": None},
    "scaling": {"min_workers": 0, "idle_timeout_s": 600.0},
    "concurrency": 1,
}
_SEEN = Seen(calls=1000, memory_max=6 << 30)


def spec(min_workers: int = 0, **resources: Any) -> dict[str, Any]:
    return {
        **_SPEC,
        "resources": {**_SPEC["resources"], **resources},
        "scaling": {**_SPEC["scaling"], "min_workers": min_workers},
    }


@pytest.mark.parametrize(
    ("asked", "seen", "told"),
    [
        (spec(), {}, []),
        (spec(), {"memory_max": 1 << 30}, [("memory", "1344Mi")]),
        (spec(memory_bytes=6 << 30), {"memory_max": 5.9 * 2**30}, [("memory", "7872Mi")]),
        (spec(memory_bytes=None), {}, []),
        (spec(gpu=["L4"]), {"gpu_held_s": 1000.0, "gpu_used_s": 900.0}, [("gpu", "")]),
        (
            spec(gpu=["L4"]),
            {"gpu_held_s": 1000.0, "gpu_used_s": 100.0, "gpu_memory_max": 2 << 30},
            [("share", "'mps', vram='2688Mi'")],
        ),
        (spec(min_workers=3), {"busy_by_minute": (30.0, 61.0)}, [("min_workers", "2")]),
        (spec(min_workers=1), {"busy_by_minute": (30.0,)}, []),
        (spec(min_workers=2), {"busy_by_minute": (0.0,)}, [("min_workers", "0")]),
        (spec(), {"calls_by_minute": (1.0, 1.0, *[0.0] * 60, 1.0)}, [("idle_timeout", "60")]),
        (spec(), {"calls_by_minute": (1.0, *[0.0] * 8, 1.0)}, []),
        (spec(min_workers=3), {"calls": 5, "busy_by_minute": (0.0,)}, []),
    ],
)
def test_each_finding_has_its_option_and_value(
    asked: dict[str, Any], seen: dict[str, Any], told: list[tuple[str, str]]
) -> None:
    found = advise(asked, msgspec.structs.replace(_SEEN, **seen), None)
    assert [(each.option, each.value) for each in found] == told


def test_the_min_workers_in_force_counts() -> None:
    seen = msgspec.structs.replace(_SEEN, busy_by_minute=(1.0,))
    assert [each.value for each in advise(spec(), seen, 4)] == ["1"]


def test_a_longer_timeout_never_has_more_cold_starts_nor_less_worker_time() -> None:
    curve = replay([1, 0, 0, 0, 2, 0, 1, *[0] * 30, 5, 0], 45.0)
    assert [each.cold_starts for each in curve] == sorted((each.cold_starts for each in curve), reverse=True)
    assert [each.worker_s for each in curve] == sorted(each.worker_s for each in curve)
    assert not any(each.is_current for each in curve)
    assert replay([0, 0], 60.0) == []


def test_a_sparkline_shows_gaps_and_survives_zeros() -> None:
    assert (sparkline([0, 1, None, 8, 4]), sparkline([0.0, None]), sparkline([])) == ("▁▁ █▄", "▁ ", "")
