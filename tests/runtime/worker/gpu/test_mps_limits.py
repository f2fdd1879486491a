"""A worker verifies that its share is enforced, against a driver that follows MPS's rules."""

# ruff: noqa: N802

from __future__ import annotations

import re

import pytest

from gpufn_core.errors import DeviceFailed
from gpufn_core.protocol.launch import MpsLimits
from gpufn_runtime.worker.gpu.cuda_driver import Driver
from gpufn_runtime.worker.gpu.mps_limits import verify
from tests.runtime.worker.fake_cuda import FakeCuda

LIMITS = MpsLimits(vram_bytes=6 << 30, sm_percent=25, multiprocessors=108)
CLIENT = {
    "CUDA_VISIBLE_DEVICES": "GPU-1",
    "CUDA_MPS_PIPE_DIRECTORY": "/run/p",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=6144M",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
}


def _error(cuda: FakeCuda, limits: MpsLimits = LIMITS) -> str:
    with pytest.raises(DeviceFailed) as caught:
        verify(limits, Driver(cuda), sleep=lambda seconds: None)
    return caught.value.message


def _numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


@pytest.mark.parametrize("percent", [1, 25, 50, 99, 100])
def test_a_client_within_its_limits_is_let_in(percent: int) -> None:
    cuda = FakeCuda(CLIENT | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)})
    verify(MpsLimits(6 << 30, percent, 108), Driver(cuda))
    assert cuda.allocated == 0


def test_a_process_that_does_not_reach_its_daemon_is_not_a_client() -> None:
    assert "not a client" in _error(FakeCuda(CLIENT, reaches=False))


def test_an_older_driver_reports_no_limit_and_the_share_applies() -> None:
    verify(LIMITS, Driver(FakeCuda(CLIENT, knows_mps=False)))
    assert _numbers(_error(FakeCuda(CLIENT, knows_mps=False, reaches=False))) == [108, 108, 27]
    unlimited = MpsLimits(6 << 30, 100, 108)
    assert _numbers(_error(FakeCuda(CLIENT, knows_mps=False, reaches=False), unlimited)) == [80 << 30, 6 << 30]


@pytest.mark.parametrize("entry", ["6G", "0=6144M,1=1024M", "GPU-2=6144M", ""])
def test_a_limit_that_the_driver_drops_is_noticed(entry: str) -> None:
    """With an entry for another device, or without a device, there is no limit."""
    told = _error(FakeCuda(CLIENT | {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": entry}))
    assert _numbers(told) == [80 << 30, 6 << 30]


def test_a_limit_that_is_only_shown_is_noticed() -> None:
    class Shown(FakeCuda):
        def cuMemAlloc_v2(self, address: object, size: object) -> int:
            return 0

    assert _numbers(_error(Shown(CLIENT))) == [6 << 30]


def test_a_server_that_starts_is_waited_for_and_not_for_ever() -> None:
    pauses: list[float] = []
    verify(LIMITS, Driver(FakeCuda(CLIENT, not_ready=3)), sleep=pauses.append)
    assert pauses == [0.05, 0.1, 0.2]
    assert "cuInit: CUDA error 807" in _error(FakeCuda(CLIENT, not_ready=99))


@pytest.mark.parametrize("code", [805, 808, 100])
def test_an_error_of_the_driver_is_reported(code: int) -> None:
    cuda = FakeCuda(CLIENT, fails=code)
    assert _error(cuda).endswith(f"cuInit: CUDA error {code}")
    assert cuda.tries == 1
