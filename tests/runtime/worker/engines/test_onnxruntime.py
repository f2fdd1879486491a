"""ONNX Runtime's engines, with the real library on the CPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest

from gpufn_core.domain.devices.engine import Backend, EngineManifest
from gpufn_core.inference.ort_threads import spin_config
from gpufn_core.spec.model_spec import DATATYPES
from gpufn_runtime.worker.engines.onnxruntime import OrtSession, open_engine
from gpufn_runtime.worker.engines.tensors import BF16, dtype_of
from tests.runtime.worker.engines.engines import manifest, rows, tensor, write_engine, write_negation


def _open(folder: Path) -> OrtSession:
    made = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=EngineManifest)
    return open_engine(made, folder, slots=1, cores=1.0)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_passes(datatype: str, tmp_path: Path) -> None:
    if datatype == "BYTES":
        array = np.array(["a", "é\0b"], np.object_)
    elif datatype == "BF16":
        array = np.array([0x3F80, 0x7F80], np.uint16).view(BF16)
    else:
        array = np.array([0, 1]).astype(dtype_of(datatype))
    specs = [tensor("x", datatype, -1)], [tensor("y", datatype, -1)]
    folder = write_engine(tmp_path / "e", {}, {}, nodes=["Identity"], inputs=specs[0], outputs=specs[1])
    found = _open(folder).run({"x": array})["y"]
    assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())


def test_bf16_without_rows(tmp_path: Path) -> None:
    specs = [tensor("x", "BF16", -1)], [tensor("y", "BF16", -1)]
    folder = write_engine(tmp_path / "e", {}, {}, nodes=["Identity"], inputs=specs[0], outputs=specs[1])
    found = _open(folder).run({"x": np.empty(0, BF16)})["y"]
    assert (found.shape, found.dtype) == ((0,), BF16)


def test_scalars_slices_and_unaligned_bytes_are_taken(tmp_path: Path) -> None:
    engine = _open(write_negation(tmp_path / "e"))
    strided = np.repeat(rows(1, 2), 2, axis=0)[::2]
    assert not strided.flags.c_contiguous
    assert engine.run({"x": strided})["y"][:, 0].tolist() == [-1, -2]
    unaligned = np.frombuffer(b"." + rows(3).tobytes(), np.uint8)[1:].view(np.float32).reshape(1, 2)
    assert engine.run({"x": unaligned})["y"].tolist() == [[-3, -3]]


def test_a_parked_engine_is_opened_again_from_memory(tmp_path: Path) -> None:
    folder = write_negation(tmp_path / "e")
    size = (folder / "model.onnx").stat().st_size
    engine = _open(folder)
    assert engine.parked_bytes == size
    engine.park()
    (folder / "model.onnx").unlink()
    engine.resume()
    assert engine.run({"x": rows(2)})["y"].tolist() == [[-2, -2]]


def test_an_engine_with_external_data_is_opened_again_from_its_folder(tmp_path: Path) -> None:
    folder = write_negation(tmp_path / "e")
    made = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=EngineManifest)
    data = msgspec.structs.replace(made.files[0], name="weights.bin")
    made = msgspec.structs.replace(made, files=(made.files[0], data, made.files[1]))
    engine = open_engine(made, folder, slots=1, cores=1.0)
    assert engine.parked_bytes == 0
    engine.park()
    engine.resume()
    assert engine.run({"x": rows(2)})["y"].tolist() == [[-2, -2]]


def test_outputs_are_in_the_manifests_names(tmp_path: Path) -> None:
    folder = write_engine(
        tmp_path / "e", {}, {},
        nodes=[("Neg", ["x"], ["minus"]), ("Abs", ["x"], ["size"])], outputs=[tensor("size"), tensor("minus")],
    )  # fmt: skip
    found = _open(folder).run({"x": rows(-2)})
    assert {name: array[0, 0] for name, array in found.items()} == {"size": 2, "minus": 2}


@pytest.mark.parametrize(
    ("settings", "cores", "threads"), [({"intra_op_threads": 3}, 1.0, 3), ({}, 1.2, 2), ({}, 0.1, 1)]
)
def test_settings_are_the_manifests_and_threads_else_the_workers_cores(
    settings: dict[str, int | str], cores: float, threads: int
) -> None:
    from gpufn_runtime.worker.engines.onnxruntime import _session_options

    options = _session_options(manifest(settings={"graph_optimization": "none", **settings}), cores)
    assert options.intra_op_num_threads == threads
    for entry, value in spin_config(onnxruntime.__version__).items():
        assert options.get_session_config_entry(entry) == value
    assert options.graph_optimization_level.name == "ORT_DISABLE_ALL"
    assert options.get_session_config_entry("session.x64quantprecision") == "1"  # otherwise int8 is wrong without VNNI


def test_an_engine_for_cuda_never_runs_on_the_cpu_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: loaded.append("CUDA's libraries"))

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this machine can run it")
    folder = write_negation(tmp_path / "e", backend=Backend.ORT_CUDA)
    with (
        pytest.raises(Exception, match=r"(?i)fallback|instead of CUDAExecutionProvider|specified provider"),
        pytest.warns(UserWarning, match="CUDAExecutionProvider"),
    ):
        _open(folder)
    assert loaded == ["CUDA's libraries"]
