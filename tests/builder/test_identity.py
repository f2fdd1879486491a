from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_builder import identity
from gpufn_builder.identity import Target
from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.devices.engine import Backend, EngineIdentity
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, Precision, ShapeProfile, ShapeRange, Tolerance

L4 = Target("NVIDIA L4", "8.9", "GPU-1", "580.1")
CPU = Target("cpu", "avx avx2")
MODEL = ModelFile("m.onnx", "a" * 64, 100)
WEIGHTS = ModelFile("m.data", "b" * 64, 200)
SAMPLES = ModelFile("s.npz", "c" * 64, 300)
PROFILE = ShapeProfile({"x": ShapeRange((1, 3), (4, 3), (8, 3))})
VERSIONS = {"onnxruntime": "onnxruntime 1.31.1"}


def _spec(**changes: Any) -> ModelSpec:
    return ModelSpec(**({"parameter": "net", "files": (MODEL, WEIGHTS)} | changes))


def _key(spec: ModelSpec, target: Target = CPU, backend: Backend = Backend.ORT_CPU) -> str:
    return identity.identity(spec, target, backend, VERSIONS).key


# --- the identity -----------------------------------------------------------------------------------------------------

OTHER: dict[str, Any] = {
    "model": "f" * 64,
    "recipe": Precision.FP16,
    "tools": {"onnx": "0"},
    "profiles": (PROFILE,),
    "max_batch": 2,
    "samples": "d" * 64,
    "flags": {"graph_optimization_level": "all"},
    "backend": Backend.TENSORRT,
    "versions": {"onnxruntime": "onnxruntime 1.31.2"},
    "device": "NVIDIA H200",
    "compute_capability": "9.0",
    "os": "plan9",
    "arch": "riscv64",
    "tolerance": Tolerance(rel_l2=0.1),
    "verified": False,
    "schema": 99,
}


def test_every_row_of_an_identity_has_another_value_here() -> None:
    assert list(OTHER) == list(EngineIdentity.__struct_fields__)


@pytest.mark.parametrize("row", OTHER)
def test_each_row_of_an_identity_changes_the_key(row: str) -> None:
    one = identity.identity(_spec(), CPU, Backend.ORT_CPU, VERSIONS)
    other = msgspec.structs.replace(one, **{row: OTHER[row]})
    assert getattr(one, row) != getattr(other, row)
    assert one.key != other.key


# --- from a ModelSpec -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"files": (MODEL,)},
        {"files": (MODEL, msgspec.structs.replace(WEIGHTS, digest="d" * 64))},
        {"files": (MODEL, msgspec.structs.replace(WEIGHTS, name="n.data"))},
        {"precision": Precision.TF32},
        {"precision": Precision.BF16},
        {"max_batch": 8},
        {"profiles": (PROFILE,)},
        {"samples": SAMPLES},
        {"tolerance": Tolerance(max_abs=1.0)},
        {"verify": False},
    ],
    ids=str,
)
def test_each_property_of_the_engine_changes_its_key(changes: dict[str, Any]) -> None:
    assert _key(_spec(**changes)) != _key(_spec())


@pytest.mark.parametrize(
    "changes",
    [
        {"files": (msgspec.structs.replace(MODEL, name="renamed.onnx"), WEIGHTS)},
        {"parameter": "other"},
        {"allow_cpu": True},
        {"build_timeout_s": 60.0},
        {"memory_limit_bytes": 1 << 30},
    ],
    ids=str,
)
def test_other_properties_do_not_change_the_key(changes: dict[str, Any]) -> None:
    assert _key(_spec(**changes)) == _key(_spec())


def test_every_field_of_a_spec_is_in_one_of_these_tables() -> None:
    makes_another = {"files", "precision", "max_batch", "profiles", "samples", "tolerance", "verify"}
    makes_none = {"parameter", "allow_cpu", "build_timeout_s", "memory_limit_bytes"}
    assert makes_another | makes_none == set(ModelSpec.__struct_fields__)


def test_the_device_makes_another_engine_and_its_driver_does_not() -> None:
    here = _key(_spec(), L4, Backend.TENSORRT)
    assert here == _key(_spec(), msgspec.structs.replace(L4, uuid="GPU-2", driver="590.0"), Backend.TENSORRT)
    assert here != _key(_spec(), msgspec.structs.replace(L4, kind="NVIDIA L40S"), Backend.TENSORRT)
    assert here != _key(_spec(), msgspec.structs.replace(L4, compute_capability="9.0"), Backend.TENSORRT)
    assert here != _key(_spec(), L4, Backend.ORT_CUDA)


def test_tf32_is_a_flag_of_gpu_compilers() -> None:
    tf32 = {
        precision: identity.flags(_spec(precision=precision, samples=SAMPLES), Backend.TENSORRT)["tf32"]
        for precision in Precision
    }
    assert tf32 == dict.fromkeys(Precision, "0") | {Precision.TF32: "1"}


def test_the_cpus_engine_of_a_gpu_build_is_that_of_a_cpu_build() -> None:
    assert _key(_spec(), L4, Backend.ORT_CPU) == _key(_spec(), identity.cpu_target(), Backend.ORT_CPU)


# --- installed backends -----------------------------------------------------------------------------------------------


def test_the_chain_leads_from_the_best_to_the_last_resort() -> None:
    gpu = (Backend.TENSORRT, Backend.ORT_CUDA)
    assert identity.chain(_spec(), L4) == gpu
    assert identity.chain(_spec(allow_cpu=True), L4) == (*gpu, Backend.ORT_CPU)
    assert identity.chain(_spec(), CPU) == identity.chain(_spec(allow_cpu=True), CPU) == (Backend.ORT_CPU,)


def test_a_gpu_is_a_target_by_its_model_and_capability() -> None:
    device = Device("GPU-1", DeviceType.GPU, "NVIDIA L4", 24 << 30, compute_capability="8.9")
    target = identity.gpu_target(device)
    assert (target.kind, target.compute_capability, target.uuid, target.is_gpu) == ("NVIDIA L4", "8.9", "GPU-1", True)


def test_a_cpu_is_known_by_its_vector_instructions() -> None:
    x86 = "processor\t: 0\nflags\t\t: fpu sse4_2 avx avx2 avx512f amx_tile rdtscp\n"
    arm = "processor\t: 0\nFeatures\t: fp asimd i8mm bf16 sve\n"
    assert identity.vector_instructions(x86) == "sse4_2 avx avx2 avx512f amx_tile"
    assert identity.vector_instructions(arm) == "asimd i8mm bf16 sve"
    assert identity.vector_instructions("") == ""


def test_installed_packages_have_the_name_of_their_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {
        "onnxruntime-gpu": "1.23.0",
        "tensorrt-cu13-bindings": "11.4.0",
        "nvidia-cuda-runtime": "13.0.1",
        "nvidia-cudnn-cu13": "9.1",
    }
    monkeypatch.setattr(identity, "_version", lambda name: versions.get(name, ""))
    identity.installed.cache_clear()
    try:
        assert identity.installed() == {
            Backend.TENSORRT: {"tensorrt": "tensorrt-cu13-bindings 11.4.0", "cuda": "nvidia-cuda-runtime 13.0.1"},
            Backend.ORT_CUDA: {
                "onnxruntime": "onnxruntime-gpu 1.23.0",
                "cuda": "nvidia-cuda-runtime 13.0.1",
                "cudnn": "nvidia-cudnn-cu13 9.1",
            },
            Backend.ORT_CPU: {"onnxruntime": "onnxruntime-gpu 1.23.0"},
        }
        del versions["onnxruntime-gpu"], versions["tensorrt-cu13-bindings"]
        identity.installed.cache_clear()
        assert identity.installed() == {}
    finally:
        identity.installed.cache_clear()
