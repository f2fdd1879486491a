"""Proofs of CUDA, with a program that plays the prover."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from gpufn_core.domain.devices.device import Health
from gpufn_runtime.agent.devices.cuda_proofs import CudaProofs
from gpufn_runtime.agent.workers import processes
from tests.waiting import until_async

# Count the runs per GPU, and print the file that has the GPU's name.
_PROVER = """
import os, pathlib, sys
folder, gpu = pathlib.Path(sys.argv[1]), os.environ["CUDA_VISIBLE_DEVICES"]
with open(folder / f"{gpu}.runs", "a") as runs:
    runs.write("x")
assert not os.path.exists(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
sys.stdout.write((folder / gpu).read_text())
"""


def _runs(folder: Path, gpu: str) -> int:
    path = folder / f"{gpu}.runs"
    return len(path.read_text()) if path.exists() else 0


def _proofs(folder: Path, *, retry_s: float = 3600.0) -> CudaProofs:
    return CudaProofs((sys.executable, "-S", "-c", _PROVER, str(folder)), retry_s=retry_s)


def test_a_gpu_on_which_cuda_fails_is_degraded_until_a_proof_succeeds(tmp_path: Path) -> None:
    (tmp_path / "GPU-0").write_text('{"trouble": "CUDA does not work: cuInit: CUDA error 802"}')
    (tmp_path / "GPU-1").write_text("{}")

    async def run() -> None:
        proofs = _proofs(tmp_path, retry_s=0.01)
        proofs.request(["GPU-0", "GPU-1"])
        running = asyncio.create_task(proofs.run())
        await until_async(lambda: _runs(tmp_path, "GPU-1"))
        trouble = await until_async(lambda: proofs.trouble("GPU-0"))
        assert trouble.health is Health.DEGRADED
        assert "802" in trouble.reason
        assert proofs.trouble("GPU-1") is None
        (tmp_path / "GPU-0").write_text("{}")
        await until_async(lambda: proofs.trouble("GPU-0") is None)
        assert _runs(tmp_path, "GPU-1") == 1, "only the GPU that failed is proven again"
        running.cancel()

    asyncio.run(run())


def test_a_gpu_is_proven_again_on_request(tmp_path: Path) -> None:
    (tmp_path / "GPU-0").write_text("{}")

    async def run() -> None:
        proofs = _proofs(tmp_path)
        proofs.request(["GPU-0"])
        running = asyncio.create_task(proofs.run())
        await until_async(lambda: _runs(tmp_path, "GPU-0") == 1)
        (tmp_path / "GPU-0").write_text('{"trouble": "CUDA does not work"}')
        proofs.request(["GPU-0"])
        await until_async(lambda: proofs.trouble("GPU-0"))
        running.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("command", "fact"),
    [
        (("/not/there",), "/not/there"),
        ((sys.executable, "-c", "print('hello')"), "hello"),
        ((sys.executable, "-c", "import os; os.abort()"), "without a result"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "0.5 s"),
    ],
)
def test_a_proof_that_does_not_end_well_degrades_the_gpu(command: tuple[str, ...], fact: str) -> None:
    async def run() -> None:
        proofs = CudaProofs(command, timeout_s=0.5)
        proofs.request(["GPU-0"])
        running = asyncio.create_task(proofs.run())
        trouble = await until_async(lambda: proofs.trouble("GPU-0"))
        assert fact in trouble.reason
        running.cancel()

    asyncio.run(run())


def test_a_prover_that_cannot_be_killed_is_recorded_and_does_not_hold_up_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a process that hangs in the driver does not end, and the agent waited for it for ever."""
    (tmp_path / "GPU-1").write_text("{}")
    monkeypatch.setattr(processes, "kill", lambda process: hanging.append(process.pid))
    hanging: list[int] = []
    hangs = f"import os, time; os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-0' and time.sleep(60)\n{_PROVER}"

    async def run() -> None:
        proofs = CudaProofs((sys.executable, "-S", "-c", hangs, str(tmp_path)), retry_s=3600, timeout_s=0.5)
        proofs.request(["GPU-0", "GPU-1"])
        running = asyncio.create_task(proofs.run())
        await until_async(lambda: _runs(tmp_path, "GPU-1"))
        assert proofs.trouble("GPU-0")
        running.cancel()

    try:
        asyncio.run(run())
    finally:
        os.kill(hanging[0], signal.SIGKILL)


_HANGS_ONCE = """
import os, pathlib, sys, time
runs = pathlib.Path(sys.argv[1]) / f"{os.environ['CUDA_VISIBLE_DEVICES']}.runs"
with open(runs, "a") as file:
    file.write("x")
if len(runs.read_text()) == 1:
    time.sleep(60)
print("{}")
"""


def test_no_second_prover_starts_while_one_hangs_in_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each retry left one more process that could not be killed."""
    hanging: list[int] = []
    monkeypatch.setattr(processes, "kill", lambda process: hanging.append(process.pid))

    async def run() -> None:
        command = (sys.executable, "-S", "-c", _HANGS_ONCE, str(tmp_path))
        proofs = CudaProofs(command, retry_s=0.01, timeout_s=0.5)
        proofs.request(["GPU-0"])
        running = asyncio.create_task(proofs.run())
        trouble = await until_async(lambda: proofs.trouble("GPU-0"))
        trouble = await until_async(lambda: (now := proofs.trouble("GPU-0")) is not trouble and now)
        assert f"process {hanging[0]} " in trouble.reason
        await until_async(lambda: _runs(tmp_path, "GPU-0") == 1)
        assert len(hanging) == 1
        os.kill(hanging[0], signal.SIGKILL)
        await until_async(lambda: proofs.trouble("GPU-0") is None)
        running.cancel()

    try:
        asyncio.run(run())
    finally:
        for pid in hanging:
            os.kill(pid, signal.SIGKILL)  # a zombie, if the test passed


def test_a_fault_of_a_proof_degrades_its_gpu_and_does_not_end_the_proofs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: any other exception ended the agent."""
    (tmp_path / "GPU-0").write_text("{}")

    def fail(pid: int) -> None:
        raise OSError(f"no descriptors are left for {pid}")

    async def run() -> None:
        proofs = _proofs(tmp_path, retry_s=0.01)
        monkeypatch.setattr(processes, "identify", fail)
        proofs.request(["GPU-0"])
        running = asyncio.create_task(proofs.run())
        trouble = await until_async(lambda: proofs.trouble("GPU-0"))
        assert "descriptors" in trouble.reason
        monkeypatch.undo()
        await until_async(lambda: proofs.trouble("GPU-0") is None)
        running.cancel()

    asyncio.run(run())


def test_requests_for_other_gpus_do_not_postpone_a_retry(tmp_path: Path) -> None:
    (tmp_path / "GPU-0").write_text('{"trouble": "CUDA does not work"}')
    (tmp_path / "GPU-1").write_text("{}")

    async def run() -> None:
        proofs = _proofs(tmp_path, retry_s=0.2)
        proofs.request(["GPU-0"])
        running = asyncio.create_task(proofs.run())
        while _runs(tmp_path, "GPU-0") < 2:
            proofs.request(["GPU-1"])
            await asyncio.sleep(0.001)
        running.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))


_HOLDER = """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
(folder / "holders").mkdir(exist_ok=True)
mine = folder / "holders" / str(os.getpid())
mine.touch()
print("{}", flush=True)
os.close(1)
sys.stdin.read()
mine.unlink()
"""


def test_the_process_of_the_last_proof_keeps_cuda_initialized_until_the_agent_ends(tmp_path: Path) -> None:
    holders = tmp_path / "holders"
    holders.mkdir()

    async def run() -> None:
        proofs = CudaProofs((sys.executable, "-S", "-c", _HOLDER, str(tmp_path)))
        running = asyncio.create_task(proofs.run())
        proofs.request(["GPU-0"])
        [first] = await until_async(lambda: list(holders.iterdir()))
        proofs.request(["GPU-0"])
        await until_async(lambda: list(holders.iterdir()) not in ([], [first]) and not first.exists())
        assert len(list(holders.iterdir())) == 1
        running.cancel()
        await until_async(lambda: not list(holders.iterdir()))

    asyncio.run(run())
