from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from gpufn_builder.checks.cpu_session import CpuSession, session_options
from gpufn_builder.checks.reference import observe, run_reference
from gpufn_builder.checks.samples import Case, generate
from gpufn_builder.onnx_model.ingest import IngestLimits, ingest
from gpufn_builder.onnx_model.normalise import NormalModel, normalise
from gpufn_builder.onnx_model.tensors import BF16, Arrays
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ShapeProfile, ShapeRange, TensorSpec
from tests.builder import models
from tests.builder.models import constant, externalise, mlp, model, node, put, spec_of, value


def normal(proto: ModelProto, tmp_path: Path, *, verify: bool = True) -> NormalModel:
    put(proto, tmp_path / "upload")
    into = tmp_path / "normal"
    into.mkdir()
    source = ingest(tmp_path / "upload", spec_of(tmp_path / "upload"), IngestLimits())
    return normalise(source, into, set_seeds=verify)


def given(**inputs: object) -> Case:
    return Case("sample 0", {name: np.asarray(each) for name, each in inputs.items()}, is_user_sample=True)


def run(proto: ModelProto, tmp_path: Path, *cases: Case) -> list[Arrays]:
    return run_reference(normal(proto, tmp_path), cases)


def test_outputs_are_those_of_the_model(tmp_path: Path) -> None:
    x = np.ones((2, 8), np.float32)
    w1, b1, w2 = models.weights("w1", 8, 16), models.weights("b1", 16), models.weights("w2", 16, 4)
    hidden = np.maximum(x @ _array(w1) + _array(b1), 0)
    (outputs,) = run(mlp(), tmp_path, given(x=x))
    np.testing.assert_allclose(outputs["y"], hidden @ _array(w2), rtol=1e-5)


def _array(tensor: TensorProto) -> np.ndarray:
    return np.frombuffer(tensor.raw_data, np.float32).reshape(tensor.dims)


def test_external_data_are_read_from_the_models_folder(tmp_path: Path) -> None:
    proto = mlp()
    (tmp_path / "upload").mkdir()
    externalise(proto, tmp_path / "upload")
    (outputs,) = run(proto, tmp_path, given(x=np.ones((1, 8), np.float32)))
    (tmp_path / "inline").mkdir()
    (inline,) = run(mlp(), tmp_path / "inline", given(x=np.ones((1, 8), np.float32)))
    assert outputs["y"].tolist() == inline["y"].tolist()


def test_products_of_integers_are_exact_on_every_processor(tmp_path: Path) -> None:
    (outputs,) = run(models.products_of_integers(), tmp_path, given(x=np.full((2, 16), 255, np.uint8)))
    assert outputs["y"].tolist() == [[16 * 255 * 127] * 4] * 2


def test_a_model_is_run_as_it_is_written_unless_it_has_products_of_integers(tmp_path: Path) -> None:
    for proto, has_products in ((mlp(), False), (models.products_of_integers(), True)):
        found = normal(proto, tmp_path / str(has_products))
        assert found.has_integer_products is has_products
    levels = {has: session_options(has_integer_products=has).graph_optimization_level.name for has in (False, True)}
    assert levels == {False: "ORT_DISABLE_ALL", True: "ORT_ENABLE_EXTENDED"}
    session = CpuSession(found.path, found.outputs, BuildStage.REFERENCE, has_integer_products=True)
    options = session._session.get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == "1"


def test_texts_go_through(tmp_path: Path) -> None:
    texts = np.array(["é", ""], np.object_)
    (outputs,) = run(models.texts(), tmp_path, given(left=texts, right=texts))
    assert outputs["joined"].tolist() == ["éé", ""]


def test_bf16_is_accepted_and_returned(tmp_path: Path) -> None:
    bf16 = TensorProto.BFLOAT16
    proto = model([node("Transpose", "x", "y", perm=[1, 0])], [value("x", [1, 2], bf16)], [value("y", [2, 1], bf16)])
    (outputs,) = run(proto, tmp_path, given(x=np.array([[1.5, -2.0]], BF16)))
    assert (outputs["y"].dtype, outputs["y"].tolist()) == (BF16, [[1.5], [-2.0]])


def test_texts_beside_bf16_are_refused_with_a_message(tmp_path: Path) -> None:
    both = model(
        [node("Identity", "text", "text_out"), node("Identity", "half", "half_out")],
        [value("text", [1], TensorProto.STRING), value("half", [1], TensorProto.BFLOAT16)],
        [value("text_out", [1], TensorProto.STRING), value("half_out", [1], TensorProto.BFLOAT16)],
    )
    case = Case("c", {"text": np.array(["a"], np.object_), "half": np.ones(1, BF16)})
    with pytest.raises(BuildFailed, match=r"texts and BF16.* not both"):
        run_reference(normal(both, tmp_path), [case])


def test_branches_run(tmp_path: Path) -> None:
    positive, negative = run(
        models.branching(), tmp_path, *(given(x=sign * np.eye(4, dtype=np.float32)) for sign in (1, -1))
    )
    assert not np.allclose(positive["y"], negative["y"])


def test_a_model_that_onnx_runtime_rejects_names_the_node(tmp_path: Path) -> None:
    proto = model([node("MatMul", "x x", "y")], [value("x", [3, 4])], [value("y", [3, 4])])
    with pytest.raises(BuildFailed) as caught:
        run(proto, tmp_path, given(x=np.ones((3, 4), np.float32)))
    assert (caught.value.stage, caught.value.node) == ("reference", "y_node")
    assert "rejects" in caught.value.message
    assert "onnxruntime_src" not in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_a_run_that_fails_names_the_node_and_the_case(tmp_path: Path) -> None:
    proto = model(
        [node("Gather", "table x", "y")],
        [value("x", ["N"], TensorProto.INT64)],
        [value("y", ["N"])],
        [constant("table", [1.0, 2.0])],
    )
    with pytest.raises(BuildFailed) as caught:
        run(proto, tmp_path, given(x=np.array([7])))
    assert (caught.value.stage, caught.value.node) == ("reference", "y_node")
    assert caught.value.message.endswith("(sample 0)")


def test_a_run_that_fails_on_generated_inputs_requests_samples(tmp_path: Path) -> None:
    proto = model(
        [node("Reshape", "x shape", "y")],
        [value("x", [6]), value("shape", [2], TensorProto.INT64)],
        [value("y", ["a", "b"])],
    )
    found = normal(proto, tmp_path)
    with pytest.raises(BuildFailed) as caught:
        run_reference(found, generate(found.inputs, (), 0))
    assert caught.value.node == "y_node"
    message = caught.value.message
    assert message.startswith("with generated inputs (fixed shapes), the model does not run: ")
    assert message.endswith("set samples= (--samples FILE) to real inputs")


def test_a_failure_in_a_subgraph_names_the_node_there(tmp_path: Path) -> None:
    inner = helper.make_graph([node("Reshape", "x shape", "inner")], "branch", [], [value("inner", None)])
    outer = helper.make_graph(
        [node("If", "flag", "outer", then_branch=inner, else_branch=inner)], "branch", [], [value("outer", None)]
    )
    proto = model(
        [node("If", "flag", "y", then_branch=outer, else_branch=outer)],
        [value("x", [6]), value("flag", [], TensorProto.BOOL)],
        [value("y", None)],
        [constant("shape", [4], np.int64)],
    )
    with pytest.raises(BuildFailed) as caught:
        run(proto, tmp_path, given(x=np.zeros(6, np.float32), flag=np.array(True)))
    assert caught.value.node == "inner_node"
    assert caught.value.message.count("Non-zero status code") == 1


def _root() -> ModelProto:
    return model([node("Sqrt", "x", "y")], [value("x", ["N"])], [value("y", ["N"])])


def test_nan_all_over_for_the_users_own_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed) as caught:
        run(_root(), tmp_path, given(x=np.array([-1, -2], np.float32)))
    assert caught.value.node == "y"
    assert caught.value.message.endswith("NaN for sample 0")


def test_some_nans_and_nans_for_generated_inputs_are_kept(tmp_path: Path) -> None:
    some = given(x=np.array([-1, 4], np.float32))
    generated = Case("fixed shapes", {"x": np.array([-1], np.float32)})
    outputs = run(_root(), tmp_path, some, generated)
    np.testing.assert_array_equal(outputs[0]["y"], [np.nan, 2])
    np.testing.assert_array_equal(outputs[1]["y"], [np.nan])


def test_nan_all_over_for_all_that_was_generated_is_refused(tmp_path: Path) -> None:
    cases = [Case(name, {"x": np.array([-1], np.float32)}) for name in ("min shapes", "max shapes")]
    with pytest.raises(BuildFailed, match=r"set samples= \(--samples FILE\)") as caught:
        run(_root(), tmp_path, *cases)
    assert (caught.value.stage, caught.value.node) == ("reference", "y")


def test_a_model_that_draws_random_numbers_has_the_same_outputs_in_each_session(tmp_path: Path) -> None:
    x = given(x=np.ones(8, np.float32))
    first, again = (run(models.noisy(), tmp_path / name, x, x) for name in ("first", "again"))
    assert [each["y"].tolist() for each in first] == [each["y"].tolist() for each in again]
    assert first[0]["y"].tolist() != first[1]["y"].tolist()


def test_outputs_that_differ_between_runs_are_refused_unless_they_are_not_verified(tmp_path: Path) -> None:
    x = given(x=np.ones(8, np.float32))
    found = replace(normal(models.noisy(), tmp_path, verify=False), random_nodes=())  # as for an unknown operator
    with pytest.raises(BuildFailed, match=r"two runs .*\(sample 0\).*--no-verify") as caught:
        run_reference(found, [x])
    assert caught.value.node == "y"
    assert run_reference(found, [x], verify=False)[0]["y"].shape == (8,)


# --- the shapes of the outputs ---------------------------------------------------------------------------------------


def _reshaping() -> ModelProto:
    return model(
        [node("Reshape", "x shape", "y")],
        [value("x", ["N"]), value("shape", ["rank"], TensorProto.INT64)],
        [value("y", None)],
    )


def test_an_unranked_output_gets_its_dimensions_from_the_runs(tmp_path: Path) -> None:
    found = normal(_reshaping(), tmp_path)
    cases = [given(x=np.ones(6, np.float32), shape=np.array(shape)) for shape in ([2, 3], [3, 2])]
    observed = observe(found, run_reference(found, cases))
    assert observed.outputs == (TensorSpec("y", "FP32", (-1, -1)),)


def test_an_output_whose_rank_changes_is_refused(tmp_path: Path) -> None:
    found = normal(_reshaping(), tmp_path)
    cases = [given(x=np.ones(6, np.float32), shape=np.array(shape)) for shape in ([2, 3], [6])]
    with pytest.raises(BuildFailed, match=r"output y .*2 dimensions .*1 "):
        observe(found, run_reference(found, cases))


@pytest.mark.parametrize("declared", [["N"], ["N", 2, 3, 4], [6]])
def test_a_declared_rank_that_all_cases_contradict_is_corrected(declared: list[str | int], tmp_path: Path) -> None:
    proto = _reshaping()
    proto.graph.output[0].CopyFrom(value("y", declared))
    found = normal(proto, tmp_path)
    cases = [given(x=np.ones(6, np.float32), shape=np.array(shape)) for shape in ([2, 3], [3, 2])]
    assert observe(found, run_reference(found, cases)).outputs == (TensorSpec("y", "FP32", (-1, -1)),)


def test_a_declared_rank_that_only_some_cases_contradict_is_refused(tmp_path: Path) -> None:
    proto = _reshaping()
    proto.graph.output[0].CopyFrom(value("y", ["N"]))
    found = normal(proto, tmp_path)
    cases = [given(x=np.ones(6, np.float32), shape=np.array(shape)) for shape in ([2, 3], [6])]
    with pytest.raises(BuildFailed, match=r"output y .*2 dimensions .*1 "):
        observe(found, run_reference(found, cases))


def test_an_output_of_another_type_than_it_was_declared_is_refused(tmp_path: Path) -> None:
    found = normal(model([], [value("x", [2], TensorProto.UINT8)], [value("x", [2], TensorProto.INT32)]), tmp_path)
    with pytest.raises(BuildFailed, match=r"output x .*INT32.* uint8") as caught:
        run_reference(found, generate(found.inputs, (), 0))
    assert caught.value.node == "x"


def test_a_size_that_is_declared_fixed_and_is_not_becomes_dynamic(tmp_path: Path) -> None:
    proto = mlp()
    proto.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    found = normal(proto, tmp_path)
    profiles = (ShapeProfile({"x": ShapeRange((1, 8), (2, 8), (2, 8))}),)
    observed = observe(found, run_reference(found, generate(found.inputs, profiles, 0)))
    assert observed.outputs == (TensorSpec("y", "FP32", (-1, 4)),)
