from __future__ import annotations

import pytest

from tests.conftest import Platform

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

_ROUNDED_BY = 4  # multiprocessors: MPS assigns them in small groups


@pytest.mark.parametrize(("function", "percent"), [("quarter", 25), ("half", 50)])
def test_a_worker_that_joined_sees_its_part_of_the_multiprocessors(
    mps_app: Platform, function: str, percent: int
) -> None:
    whole = mps_app.invoke("whole")
    seen = mps_app.invoke(function, {"mib": 1})["multiprocessors"]
    assert abs(seen - whole * percent / 100) <= _ROUNDED_BY, f"{seen} of {whole}"


@pytest.mark.parametrize(("function", "limit_mib"), [("quarter", 2048), ("half", 3072)])
def test_an_allocation_beyond_the_limit_is_refused_and_one_within_is_not(
    mps_app: Platform, function: str, limit_mib: int
) -> None:
    assert mps_app.invoke(function, {"mib": limit_mib // 2})["refused"] == ""
    assert "out of memory" in mps_app.invoke(function, {"mib": limit_mib + 512})["refused"]


def test_two_functions_are_on_the_gpu_at_the_same_time(mps_app: Platform) -> None:
    for function in ("quarter", "half"):
        mps_app.invoke(function, {"mib": 1})
    assert (mps_app.ready_workers("quarter"), mps_app.ready_workers("half")) == (1, 1)
