"""From folders to a session: the first engine that works, and a reason for each that does not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpufn_core.domain.devices.engine import Accuracy, Backend
from gpufn_core.protocol.launch import WorkerConfig
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, Precision
from gpufn_runtime.worker.engines import golden_check
from gpufn_runtime.worker.engines.load import NoEngine, load_session
from gpufn_runtime.worker.engines.session import Session
from tests.runtime.worker.engines.engines import EXACT, manifest, rows, tensor, write_engine, write_negation


def _load(*folders: Path) -> Session:
    model = ModelSpec(parameter="net", files=(ModelFile("m.onnx", "0" * 64, 1),))
    spec = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), models=(model,))
    config = WorkerConfig(
        worker="w", function="f", revision=1, spec=spec, bundle_dir="", socket="", launched_at=time.time(),
        engines={"net": tuple(map(str, folders))},
    )  # fmt: skip
    return load_session(config, "net")


def test_the_best_engine_is_taken(tmp_path: Path, capsys: Any) -> None:
    session = _load(write_negation(tmp_path / "best", max_batch=2), write_negation(tmp_path / "next", max_batch=1))
    assert session.manifest.max_batch == 2
    assert session(rows(1)).tolist() == [[-1, -1]]
    assert capsys.readouterr().err == ""


def _broken(folder: Path, how: str) -> Path:
    if how == "missing":
        return folder
    if how == "not loadable":
        return write_engine(folder, {"x": rows(1)}, {"y": rows(-1)}, nodes=["NoSuchOperator"])
    if how == "wrong output":
        return write_engine(folder, {"x": rows(1)}, {"y": rows(2)})
    if how == "other backend":
        return write_negation(folder, backend=Backend.TENSORRT)
    write_negation(folder)
    path = folder / {"damaged": "model.onnx", "no manifest": "manifest.json", "golden gone": "golden.npz"}[how]
    if how == "golden gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    return folder


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("missing", "No such file"),
        ("no manifest", "JSON is malformed"),
        ("golden gone", "No such file"),
        ("damaged", "model.onnx is damaged: its digest is"),
        ("not loadable", "NoSuchOperator"),
        ("wrong output", "y differs from the build: rel_l2 is 1.5, but 1e-05 is allowed"),
        ("other backend", "No module named 'tensorrt'"),
    ],
)
def test_an_engine_that_fails_is_reported_and_the_next_one_is_loaded(
    how: str, reason: str, tmp_path: Path, capsys: Any
) -> None:
    bad = _broken(tmp_path / "bad", how)
    session = _load(bad, write_negation(tmp_path / "good"))
    assert session(rows(1)).tolist() == [[-1, -1]]
    told = capsys.readouterr().err
    assert told.startswith("net: engine bad: ")
    assert reason in told
    assert "next" in told.rpartition(";")[2]
    with pytest.raises(NoEngine, match=r"^net: .* bad: "):
        _load(bad)


def test_without_an_engine_for_the_device_nothing_is_tried() -> None:
    with pytest.raises(NoEngine, match=r"^net: .* device"):
        _load()


_THOUSAND = np.ones(1000, np.float32)


def _off_by(part: float) -> Any:
    """A thousand ones, with a relative L2 error of `part`."""
    return _THOUSAND * np.float32(1 + part)


@pytest.mark.parametrize(
    ("recipe", "measured", "found", "passes"),
    [
        (Precision.FP32, 0.0, _off_by(5e-6), True),
        (Precision.FP32, 0.0, _off_by(2e-4), False),
        (Precision.FP32, 1.5e-4, _off_by(2e-4), True),  # its function tolerates more, and the builder measured more
        (Precision.FP16, 0.0, _off_by(4e-3), True),
        (Precision.FP16, 0.0, _off_by(6e-3), False),
        (Precision.INT8, 0.0, _off_by(1e-2), True),
        (Precision.INT8, 0.0, _off_by(3e-2), False),
        (Precision.INT8, 2e-2, _off_by(3e-2), True),
        (Precision.FP32, 0.0, _THOUSAND.astype(np.float64), False),
        (Precision.FP32, 0.0, _THOUSAND[None], False),
        (Precision.FP32, 0.0, np.full(1000, np.nan, np.float32), False),
    ],
)
def test_a_golden_sample_may_differ_by_the_preset_or_twice_the_measured_deviation(
    recipe: Precision, measured: float, found: Any, passes: bool
) -> None:
    made = manifest(recipe=recipe, accuracy=Accuracy(max_abs=0.0, rel_l2=measured, cosine=1.0))
    try:
        golden_check.compare({"y": found}, {"y": _THOUSAND}, made)
    except golden_check.WrongOutput:
        assert not passes
    else:
        assert passes


@pytest.mark.parametrize(
    ("recorded", "found"),
    [
        ([1, np.nan], [1, np.inf]),
        ([1, np.inf], [1, -np.inf]),
        ([np.inf, np.inf], [np.nan, -np.inf]),
        ([1e300, 1e300], [2e300, 1e300]),
    ],
)
@pytest.mark.filterwarnings("error")
def test_values_that_cannot_be_compared_are_not_equal(recorded: list[float], found: list[float]) -> None:
    made = manifest([tensor("x", "FP64")], [tensor("y", "FP64")])
    with pytest.raises(golden_check.WrongOutput):
        golden_check.compare({"y": np.array(found)}, {"y": np.array(recorded)}, made)


def test_an_engine_that_was_not_verified_is_not_compared() -> None:
    made = manifest(accuracy=None)
    golden_check.compare({"y": np.ones(2)}, {"y": np.zeros(3)}, made)


def test_values_near_zero_differ_by_rounding_only() -> None:
    """Regression: a detector's outputs for an image without objects differed by 12 % between numbers of threads."""
    recorded, found = np.array([1e-6, 1e-300]), np.array([0.9e-6, 2e-300])
    made = manifest([tensor("x", "FP64")], [tensor("y", "FP64")], accuracy=EXACT)
    golden_check.compare({"y": found}, {"y": recorded}, made)


def test_other_values_as_small_as_the_recorded_ones_are_wrong() -> None:
    """Regression: an atol of 1e-5 accepted every output below it."""
    made = manifest([tensor("x", "FP64")], [tensor("y", "FP64")], accuracy=EXACT)
    with pytest.raises(golden_check.WrongOutput):
        golden_check.compare({"y": np.zeros(2)}, {"y": np.array([1e-6, 2e-6])}, made)


def test_nan_where_it_was_when_built_is_no_difference() -> None:
    array = np.array([1, np.nan, np.inf], np.float32)
    golden_check.compare({"y": array}, {"y": array.copy()}, manifest(accuracy=EXACT))


def test_a_golden_sample_keeps_bf16_and_texts(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"in.t": np.array(["a", "bc"]), "out.b": np.array([0x3F80], np.uint16)}
    np.savez(tmp_path / "g.npz", **arrays)
    made = manifest([tensor("t", "BYTES", -1)], [tensor("b", "BF16", -1)])
    inputs, outputs = golden_check.read(tmp_path / "g.npz", made)
    assert inputs["t"].tolist() == ["a", "bc"]
    assert outputs["b"].view(np.uint16).tolist() == [0x3F80]
