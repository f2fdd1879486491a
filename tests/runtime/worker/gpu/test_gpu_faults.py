"""Reports and exit of a worker whose GPU fails during a call."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.protocol.frames import Drain, Draining, Result
from gpufn_core.protocol.launch import EXIT_GPU_FAULT, EXIT_START_FAILED, MpsLimits
from tests.runtime.worker.conftest import MakePeer

_FAILS = """
def f(text: str) -> str:
    raise RuntimeError(text)
"""
_ILLEGAL = b'{"text": "CUDA error: an illegal memory access was encountered"}'
_TERMINATED = b'{"text": "CUDA_ERROR_MPS_CLIENT_TERMINATED"}'
_OUT_OF_MEMORY = b'{"text": "cudaMalloc: out of memory"}'


def _failed(worker: Any, body: bytes) -> tuple[str, str]:
    worker.run(body)
    result, _ = worker.result()
    assert result.error is not None
    return result.kind.value, result.error.code


def test_a_gpu_that_fails_loses_the_call_and_has_the_worker_replaced(start: MakePeer) -> None:
    worker = start(_FAILS, gpu=("any",))
    worker.run(_TERMINATED)
    assert worker.next()[0] == Draining()
    result, _ = worker.next()
    assert isinstance(result, Result)
    assert result.error is not None
    assert (result.kind.value, result.error.code, result.error.retryable) == ("lost", "device_failed", True)
    assert "(CUDA error 810, MPS_CLIENT_TERMINATED)" in result.error.message
    worker.send(Drain())
    assert worker.wait() == 0
    assert "replacing this worker" in worker.printed()


def test_a_worker_whose_device_fails_exits_with_the_code_for_it(start: MakePeer) -> None:
    worker = start(_FAILS, gpu=("any",))
    worker.run(b'{"text": "cudaErrorECCUncorrectable: ..."}')
    assert worker.next()[0] == Draining()
    assert worker.result()[0].kind.value == "lost"
    worker.send(Drain())
    assert worker.wait() == EXIT_GPU_FAULT


def test_an_error_of_a_kernel_is_the_functions_own_on_an_unshared_gpu(start: MakePeer) -> None:
    worker = start(_FAILS, gpu=("any",))
    worker.run(_ILLEGAL)
    assert worker.next()[0] == Draining()  # its context is unusable, whatever the cause
    result, _ = worker.result()
    assert result.error is not None
    assert (result.kind.value, result.error.error_type) == ("raised", "RuntimeError")
    worker.send(Drain())
    assert worker.wait() == 0


def test_too_little_memory_is_the_functions_own_and_the_worker_stays(start: MakePeer) -> None:
    worker = start(_FAILS, gpu=("any",))
    assert [_failed(worker, _OUT_OF_MEMORY) for _ in range(2)] == [("raised", "function_raised")] * 2


def test_without_a_gpu_such_messages_are_ignored(start: MakePeer) -> None:
    worker = start(_FAILS)
    assert [_failed(worker, _TERMINATED) for _ in range(2)] == [("raised", "function_raised")] * 2


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        ("cudaErrorECCUncorrectable: ...", "device_failed", EXIT_GPU_FAULT),
        ("No CUDA GPUs are available", "device_failed", EXIT_GPU_FAULT),
        ("it does not work", "function_start_failed", EXIT_START_FAILED),
    ],
)
def test_a_gpu_that_fails_at_the_start_is_reported_as_such(
    make_peer: MakePeer, error: str, code: str, exit_code: int
) -> None:
    worker = make_peer(f"raise RuntimeError({error!r})", gpu=("any",)).launch()
    failed = worker.start_failure()
    assert (failed.phase, failed.error.code) == ("load", code)
    assert worker.wait() == exit_code


def test_without_a_proof_of_its_share_no_code_of_the_users_runs(make_peer: MakePeer) -> None:
    source = "print('it ran')\n" + _FAILS
    limits = MpsLimits(vram_bytes=1 << 30, sm_percent=100)
    worker = make_peer(source, gpu=("any",), mps=limits).launch()
    failed = worker.start_failure()
    assert (failed.phase, failed.error.code) == ("join", "device_failed")
    if "there is no CUDA driver" not in failed.error.message:
        pytest.skip(f"this machine has a driver: {failed.error.message}")
    assert worker.logs == []
    assert "it ran" not in worker.printed()
