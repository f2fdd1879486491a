"""The inspection of a machine, with a fake driver, because there is none where these tests run."""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_check import machine
from gpu_check.checks import cuda, inventory
from gpu_check.machine import CannotRun, Gpu
from gpu_check.mps import need_mps
from gpu_check.platform import declared
from gpu_check.program_output import output_of
from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_platform.sandbox import policy
from gpufn_platform.sandbox.support import Support
from gpufn_runtime.agent.devices.declared import parse_devices
from tests.runtime.agent.mps.machine import Machine as Programs

GPU = Gpu("GPU-1", "NVIDIA X", 80 << 30, "9.0")


class NVMLError(Exception):
    pass


class Driver(types.ModuleType):
    """A fake pynvml with one GPU that reports its identity, its temperature, and nothing else."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, fails: str = "", count: int = 1) -> None:
        super().__init__("pynvml")
        self._fails = fails
        self.is_open = False
        answers = {
            "nvmlDeviceGetCount": count,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": GPU.uuid,
            "nvmlDeviceGetName": GPU.name,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=GPU.memory_bytes, used=1 << 30),
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetTemperature": 41,
        }
        for name, answer in answers.items():
            setattr(self, name, lambda *_, answer=answer: answer)

    def nvmlInit(self) -> None:  # noqa: N802
        if self._fails:
            raise NVMLError(self._fails)
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("nvmlDeviceGet"):

            def refuse(*_: object) -> None:
                raise NVMLError("Not Supported")

            return refuse
        if name.startswith("NVML_"):
            return 0
        raise AttributeError(name)


def test_a_gpu_is_read_and_nvml_is_closed_before_any_step_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    found = machine.inspect(pretend=True)
    assert (found.gpus, found.driver, found.pretended, found.torch_device) == ((GPU,), "580.1", False, "cuda")
    assert found.real_gpu() == GPU
    assert not driver.is_open


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        (Driver(fails="Driver Not Loaded"), "no GPU: the NVIDIA driver does not respond (Driver Not Loaded)"),
        (Driver(count=0), "no GPU: the driver reports none"),
        (None, "no GPU: nvidia-ml-py is not installed"),
    ],
)
def test_a_missing_figure_has_its_reason(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, why: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    found = machine.inspect()
    with pytest.raises(CannotRun, match=re.escape(why)):
        found.gpu()
    assert found.torch_device == "cpu"


def test_one_of_several_gpus_or_a_pretended_one_is_declared_to_the_platform() -> None:
    one = machine.Machine(gpus=(GPU,))
    two = machine.Machine(gpus=(GPU, Gpu("GPU-2", "NVIDIA X", 1, "9.0")))
    pretended = machine.Machine(gpus=(GPU,), pretended=True)
    assert declared(one) == {}
    for each in (two, pretended):
        (device,) = parse_devices(declared(each)["GPUFN_DEVICES"])
        assert device == Device("GPU-1", DeviceType.GPU, "NVIDIA X", 80 << 30, compute_capability="9.0")
    assert declared(machine.Machine()) == {}


def test_steps_with_mps_are_skipped_where_its_daemon_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{programs.folder}:{os.environ['PATH']}")
    found = machine.Machine(gpus=(GPU,), programs={"nvidia-cuda-mps-control": str(programs.folder)})
    try:
        assert need_mps(found) == GPU
        programs.set(broken=True)
        with pytest.raises(CannotRun, match=r"MPS .* GPU-1: .*library do not match"):
            need_mps(found)
        assert programs.rests()
    finally:
        programs.end()
    with pytest.raises(CannotRun, match="nvidia-cuda-mps-control"):
        need_mps(machine.Machine(gpus=(GPU,)))


@pytest.mark.parametrize(("memory_gib", "told"), [(3.8, {"GPUFN_MEMORY": "64Gi"}), (125.9, {})])
def test_a_machine_with_growing_memory_has_enough_for_the_steps(memory_gib: float, told: dict[str, str]) -> None:
    assert declared(machine.Machine(gpus=(GPU,), about={"memory_gib": memory_gib})) == told
    assert declared(machine.Machine(why_no_gpu="none", about={"memory_gib": memory_gib})) == {}


def test_a_missing_value_of_a_device_is_reported_in_the_drivers_words() -> None:
    read = inventory.metrics(Driver(), "handle")
    assert (read["memory_total_mib"], read["temperature_c"]) == (80 << 10, 41)
    assert read["power_w"] == "Not Supported"
    assert len(read) >= 20


def test_how_workers_are_confined_is_read_from_the_agents_log(tmp_path: Path) -> None:
    support = Support(signals="Landlock is of version 4")
    described = policy.describe(policy.Isolation.AUTO, support)
    log = tmp_path / "agent.log"
    log.write_text(f"INFO started\nINFO worker processes run {described}\nINFO node n1 is ready\n")
    assert inventory.confinement_of(log) == described
    log.write_text("")
    assert inventory.confinement_of(log) == "unknown"


def test_every_used_name_of_nvml_is_in_the_real_library() -> None:
    library = pytest.importorskip("pynvml")
    said = {
        name
        for module in (machine, inventory)
        for name in re.findall(r"\bnvml\.(nvml\w+|NVML\w+)", Path(str(module.__file__)).read_text())
    }
    assert len(said) > 20
    assert sorted(name for name in said if not hasattr(library, name)) == []


def test_an_answer_that_is_no_error_of_nvml_fails_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()

    def mismatched(*_: object) -> None:
        raise RuntimeError("newer than the driver")

    monkeypatch.setattr(driver, "nvmlDeviceGetComputeRunningProcesses", mismatched, raising=False)
    assert inventory.metrics(driver, "handle")["processes"] == "newer than the driver"


def test_a_gpu_is_kept_awake_by_having_it_open(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()

    def opened() -> set[str]:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return {os.path.basename(os.readlink(link)) for link in links if os.path.exists(link)} & set(
            os.listdir(tmp_path)
        )

    with machine.keep_awake(f"{tmp_path}/nvidia[0-9]*"):
        assert opened() == {"nvidia0"}
    assert opened() == set()


def test_the_output_of_a_program_is_kept_for_every_end() -> None:
    assert output_of(["cat"], "yes").startswith("yes\n[exit code 0, ")
    assert output_of(["not-there"]).endswith(f": {os.strerror(2)}")
    assert output_of(["sh", "-c", "echo begun; exec sleep 60"], timeout_s=1.0).endswith("[not finished after 1 s]")


@pytest.mark.parametrize(
    ("ends", "wrong"),
    [
        ("finished('multiply correctly', True)", []),
        ("finished('multiply correctly', False)", ["exit code 0; no output"]),
        (
            "import resource\nif resource.getrlimit(resource.RLIMIT_DATA)[0] == 16 << 30: raise MemoryError\n"
            "finished('multiply correctly', True)",
            ["no CUDA context can be created within RLIMIT_DATA of 16 GiB"],
        ),
        ("raise OSError('libcuda.so.1: cannot open')", ["exit code 1; OSError: libcuda.so.1: cannot open"]),
    ],
)
def test_an_incomplete_cuda_check_reports_its_last_step(
    ends: str, wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = cuda._PROGRAM.partition("from gpufn_runtime")[0]
    monkeypatch.setattr(cuda, "_PROGRAM", f"{begins}finished('load libcuda', '')\n{ends}\n")
    monkeypatch.setattr(machine.Machine, "need_module", lambda *_: None)
    found = cuda.cuda(machine.Machine(gpus=(GPU,)))
    assert next(row[0] for row in found.tables[0].rows) == "load libcuda"
    assert found.wrong == wrong
