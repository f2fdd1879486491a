from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto

from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.checks.reference import run_reference
from gpufn_builder.checks.rounding import OPTIMIZER_FACTOR, floor_of, rounding_floors
from gpufn_builder.checks.samples import Case, generate
from gpufn_builder.onnx_model.normalise import NormalModel
from gpufn_core.domain.devices.engine import BuildStage
from tests.builder.checks.test_reference import normal
from tests.builder.models import amplified_rounding, cnn, constant, model, node, value


def _floors(proto: ModelProto, tmp_path: Path, case: Case | None = None) -> dict[str, float]:
    found: NormalModel = normal(proto, tmp_path)
    cases = [case] if case else generate(found.inputs, (), 0)
    (floors,) = rounding_floors(found, cases, run_reference(found, cases))
    return floors


def test_the_floor_is_a_multiple_of_the_change_by_the_optimizer(tmp_path: Path) -> None:
    found = normal(amplified_rounding(), tmp_path)
    cases = generate(found.inputs, (), 0)
    reference = run_reference(found, cases)
    ((_, floor),) = rounding_floors(found, cases, reference)[0].items()
    optimized = CpuSession(found.path, found.outputs, BuildStage.REFERENCE, is_optimized=True).run(cases[0].inputs)
    change = np.abs(optimized["y"] - reference[0]["y"])
    assert floor == pytest.approx(OPTIMIZER_FACTOR * change.max(), rel=1e-3)
    assert np.any(change > 1e-5 + 1e-4 * np.abs(reference[0]["y"])), "fp32's tolerance is too small for it"


@pytest.mark.parametrize(
    ("optimized", "expected"),
    [([2.0, 10.001], 0.004), ([2.0, 11.0], 0.1), ([np.nan, 10.001], 0.004), ([2.0], 0.0)],
)
def test_a_change_that_rounding_does_not_explain_is_no_floor(optimized: list[float], expected: float) -> None:
    """An error of the optimizer would pass otherwise, because engines for the CPU have it too."""
    assert floor_of(np.array([2.0, 10.0]), np.array(optimized)) == pytest.approx(expected, rel=1e-3)


def test_a_model_that_the_optimizer_does_not_change_has_no_floor(tmp_path: Path) -> None:
    proto = model([node("Add", "x one", "y")], [value("x", [4])], [value("y", [4])], [constant("one", 1.0)])
    assert _floors(proto, tmp_path) == {"y": 0.0}


def test_only_floats_have_a_floor(tmp_path: Path) -> None:
    proto = model([node("Shape", "x", "y")], [value("x", [4])], [value("y", [1], 7)])
    assert _floors(proto, tmp_path) == {}


def test_infinities_and_nans_have_no_floor(tmp_path: Path) -> None:
    proto = model([node("Log", "x", "y")], [value("x", [3])], [value("y", [3])])
    case = Case("sample 0", {"x": np.array([-1.0, 0.0, 1.0], np.float32)})
    assert _floors(proto, tmp_path, case) == {"y": 0.0}


def test_each_case_has_its_own_floors(tmp_path: Path) -> None:
    found = normal(cnn(), tmp_path)
    cases = [
        Case(f"sample {rows}", {"image": np.ones((rows, 3, 8, 8), np.float32)}, is_user_sample=True) for rows in (1, 2)
    ]
    steps: list[str] = []
    floors = rounding_floors(found, cases, run_reference(found, cases), steps.append)
    assert [set(each) for each in floors] == [{"scores"}] * 2
    assert len(steps) == len(cases)
