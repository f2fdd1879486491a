from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from gpufn_core.protocol.launch import PROVE_CUDA, CudaProof
from gpufn_runtime.worker.gpu.cuda_proof import prove
from tests.runtime.worker.fake_cuda import FakeCuda


@pytest.mark.parametrize(
    ("code", "facts"),
    [
        (0, []),
        (2, []),  # the GPU is full, or in exclusive use by another process
        (46, []),
        (802, ["802", "SYSTEM_NOT_READY", "nvidia-fabricmanager"]),
        (803, ["803", "SYSTEM_DRIVER_MISMATCH", "reboot"]),
        (999, ["999", "UNKNOWN"]),
        (1234, ["1234"]),
    ],
)
def test_the_proof_names_the_error_and_its_remedy(code: int, facts: list[str]) -> None:
    trouble = prove(FakeCuda({"CUDA_VISIBLE_DEVICES": "GPU-0"}, fails=code)).trouble
    assert bool(trouble) == bool(facts)
    assert [fact for fact in facts if fact not in trouble] == []


def test_the_proof_runs_as_a_process_of_its_own() -> None:
    """On a machine without a driver it reports that."""
    command = [sys.executable, "-m", "gpufn_runtime.worker", PROVE_CUDA]
    output = subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL).stdout
    assert msgspec.json.decode(output, type=CudaProof) == prove()
