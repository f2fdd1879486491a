from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, TensorProto, checker, helper, numpy_helper

from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.checks.reference import run_reference
from gpufn_builder.checks.samples import Case, generate
from gpufn_builder.checks.steps import OnStep, ignore_step
from gpufn_builder.onnx_model.ingest import IngestLimits, ingest
from gpufn_builder.onnx_model.normalise import NormalModel, normalise
from gpufn_builder.onnx_model.profiles import resolve_profiles
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.precision.transform import TransformedModel, transform
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TOLERANCES, Precision, ShapeProfile, ShapeRange, Tolerance
from tests.builder import models
from tests.builder.models import constant, model, node, put, spec_of, value, weights

_TOKENS = ShapeRange((1, 2), (2, 5), (4, 9))
_HALVES = (Precision.FP16, Precision.BF16)


class Prepared:
    """A model before the transform, with generated cases that are marked as user samples."""

    def __init__(self, proto: ModelProto, tmp_path: Path) -> None:
        put(proto, tmp_path / "upload")
        self.into = tmp_path / "work"
        self.into.mkdir()
        has_tokens = proto.graph.input[0].name == "tokens"
        profiles = (ShapeProfile({"tokens": _TOKENS, "mask": _TOKENS}),) if has_tokens else ()
        has_rows = proto.graph.input[0].type.tensor_type.shape.dim[0].HasField("dim_param")
        spec = spec_of(tmp_path / "upload", max_batch=4 if has_rows else 1, profiles=profiles)
        self.normal: NormalModel = normalise(ingest(tmp_path / "upload", spec, IngestLimits()), self.into)
        generated = generate(self.normal.inputs, resolve_profiles(self.normal.inputs, spec, {}), 0)
        self.cases = [Case(case.name, case.inputs, is_user_sample=True) for case in generated]
        self.reference: list[Arrays] = run_reference(self.normal, self.cases)

    def into_precision(
        self, precision: Precision, tolerance: Tolerance | None = None, on_step: OnStep = ignore_step
    ) -> TransformedModel:
        return transform(
            self.normal,
            precision,
            self.cases,
            reference=self.reference,
            tolerance=tolerance or TOLERANCES[precision],
            into=self.into,
            on_step=on_step,
        )


def operators(path: Path) -> list[str]:
    return [each.op_type for each in onnx.load(path).graph.node]


MODELS = [
    models.mlp, models.cnn, models.encoder, models.texts, models.branching, models.several_outputs, models.over_rows,
    models.fused,
]  # fmt: skip


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16, Precision.INT8])
def test_a_model_keeps_its_answers_and_its_types(
    make: Callable[[], ModelProto], precision: Precision, tmp_path: Path
) -> None:
    prepared = Prepared(make(), tmp_path)
    made = prepared.into_precision(precision)
    checker.check_model(made.path, full_check=True)
    before, after = onnx.load(prepared.normal.path).graph, onnx.load(made.path).graph
    assert [(each.name, each.type) for each in after.input] == [(each.name, each.type) for each in before.input]
    assert [each.type.tensor_type.elem_type for each in after.output] == [
        each.type.tensor_type.elem_type for each in before.output
    ]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32])
def test_float32_is_left_as_it_is(precision: Precision, tmp_path: Path) -> None:
    prepared = Prepared(models.mlp(), tmp_path)
    made = prepared.into_precision(precision)
    assert (made.path, made.cpu_path, made.comparison) == (prepared.normal.path, prepared.normal.path, None)


@pytest.mark.parametrize("precision", _HALVES)
def test_a_network_of_products_is_all_in_half_precision(precision: Precision, tmp_path: Path) -> None:
    made = Prepared(models.cnn(), tmp_path).into_precision(precision)
    assert operators(made.path) == [
        "Cast", "Conv", "Relu", "Conv", "Add", "GlobalAveragePool", "Flatten", "Gemm", "Softmax", "Cast",
    ]  # fmt: skip
    kinds = {tensor.data_type for tensor in onnx.load(made.path).graph.initializer}
    assert kinds == {TensorProto.FLOAT16 if precision is Precision.FP16 else TensorProto.BFLOAT16}


def test_the_statistics_of_a_normalisation_stay_in_float32(tmp_path: Path) -> None:
    found = operators(Prepared(models.encoder(), tmp_path).into_precision(Precision.FP16).path)
    start = found.index("Pow")
    assert found[start - 1 : start + 6] == ["Cast", "Pow", "ReduceMean", "Add", "Sqrt", "Cast", "Div"]


def test_a_constant_that_fp16_cannot_hold_is_reported_and_not_clipped(tmp_path: Path) -> None:
    proto = model(
        [node("MatMul", "x w", "h"), node("Min", "h ceiling", "y")],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
        [weights("w", 4, 4), constant("ceiling", 1e9)],
    )
    made = Prepared(proto, tmp_path).into_precision(Precision.FP16)
    assert re.match(r"1 nodes in fp16; kept in fp32, .*: ceiling$", made.summary)
    by_name = {tensor.name: tensor for tensor in onnx.load(made.path).graph.initializer}
    assert by_name["ceiling"].data_type == TensorProto.FLOAT


@pytest.mark.parametrize(
    "ceiling",
    [
        [node("Constant", "", "ceiling", value=constant("", 1e9))],
        [node("Constant", "", "ceiling", value_float=1e9)],
        [node("Constant", "", "ceiling", value_floats=[1e9, 1e9, 1e9, 1e9])],
        [node("ConstantOfShape", "shape", "ceiling", value=constant("", [1e9]))],
    ],
    ids=["value", "value_float", "value_floats", "ConstantOfShape"],
)
def test_values_beyond_fp16_are_found_in_every_form_of_the_graph(ceiling: list[NodeProto], tmp_path: Path) -> None:
    proto = model(
        [node("MatMul", "x w", "h"), *ceiling, node("Min", "h ceiling", "y")],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
        [weights("w", 4, 4), constant("shape", [4], np.int64)],
    )
    made = Prepared(proto, tmp_path).into_precision(Precision.FP16)
    assert re.match(r"1 nodes in fp16; kept in fp32, .*: ceiling$", made.summary)


def test_an_epsilon_that_would_vanish_is_left_in_float32(tmp_path: Path) -> None:
    proto = model(
        [node("MatMul", "x w", "h"), node("Add", "h tiny", "y")],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
        [weights("w", 4, 4), constant("tiny", 1e-12)],
    )
    assert "their values: tiny" in Prepared(proto, tmp_path).into_precision(Precision.FP16).summary


def _overflowing_input() -> ModelProto:
    return model(
        [node("MatMul", "x w", "h"), node("Mul", "h big", "scaled"), node("MatMul", "scaled w", "y")],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
        [weights("w", 4, 4), constant("big", 1e6)],
    )


# --- layers that stay in fp32 ---------------------------------------------------------------------------------------


def test_layers_that_overflow_half_precision_stay_in_float32(tmp_path: Path) -> None:
    made = Prepared(models.overflowing(), tmp_path).into_precision(Precision.FP16)
    assert made.kept == ("large_node", "y_node")
    assert operators(made.path) == ["Cast", "MatMul", "Relu", "Cast", "MatMul", "MatMul"]
    assert made.comparison is not None
    assert made.comparison.worst_accuracy.rel_l2 < 5e-3
    assert "large_node" in made.first_difference


def test_a_layer_whose_input_overflows_half_precision_stays_in_float32(tmp_path: Path) -> None:
    made = Prepared(_overflowing_input(), tmp_path).into_precision(Precision.FP16)
    assert made.kept == ("y_node",)
    assert operators(made.path) == ["Cast", "MatMul", "Cast", "Mul", "MatMul"]


def test_bf16_does_not_overflow_so_all_layers_are_lowered(tmp_path: Path) -> None:
    made = Prepared(models.overflowing(), tmp_path).into_precision(Precision.BF16)
    assert (made.kept, made.first_difference) == ((), "")


def test_a_layer_that_loses_its_accuracy_in_int8_is_not_quantised(tmp_path: Path) -> None:
    prepared = Prepared(models.outlier(), tmp_path)
    made = prepared.into_precision(Precision.INT8)
    assert made.kept == ("h_node",)
    for path in (made.path, made.cpu_path):
        graph = onnx.load(path).graph
        inputs = {each.output[0]: list(each.input) for each in graph.node if each.op_type == "MatMul"}
        assert inputs["h"] == ["scaled", "w"]
        assert "v" not in next(names for output, names in inputs.items() if output != "h")


def test_the_products_before_the_first_node_that_differs_stay_in_float32(tmp_path: Path) -> None:
    """A difference of almost equal values: the products before it must be exact, not the subtraction."""
    proto = model(
        [
            node("MatMul", "x w", "h"),
            node("MatMul", "x v", "k"),
            node("Sub", "h k", "near"),
            node("MatMul", "near u", "y"),
        ],
        [value("x", ["N", 8])],
        [value("y", ["N", 8])],
        [
            weights("w", 8, 8),
            constant("v", numpy_helper.to_array(weights("w", 8, 8)) * 1.001 + 1e-3),
            weights("u", 8, 8),
        ],
    )
    made = Prepared(proto, tmp_path).into_precision(Precision.FP16)
    assert set(made.kept) == {"h_node", "k_node"}
    assert "near_node" in made.first_difference


def test_a_model_of_which_too_many_layers_differ_is_refused_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufn_builder.precision.transform.MAX_ROUNDS", 1)
    with pytest.raises(BuildFailed) as caught:
        Prepared(models.overflowing(), tmp_path).into_precision(Precision.FP16)
    assert (caught.value.stage, caught.value.node) == ("transform", "large_node")
    assert caught.value.message.startswith("in fp16 output y ")
    assert "large_node" in caught.value.message


def test_a_precision_that_no_layer_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=r"in fp16 output y .* \w+ shapes: max_abs is ") as caught:
        Prepared(models.mlp(), tmp_path).into_precision(Precision.FP16, Tolerance(max_abs=1e-9))
    assert caught.value.node is not None


def test_a_conversion_is_not_compared_without_verification(tmp_path: Path) -> None:
    prepared = Prepared(models.overflowing(), tmp_path)
    made = transform(prepared.normal, Precision.FP16, prepared.cases, reference=[], tolerance=None, into=prepared.into)
    assert (made.kept, made.comparison) == ((), None)


def test_layers_without_names_are_named_by_their_output(tmp_path: Path) -> None:
    proto = models.outlier()
    for each in proto.graph.node:
        each.ClearField("name")
    made = Prepared(proto, tmp_path).into_precision(Precision.INT8)
    assert made.kept == ("h",)


def test_the_body_of_an_if_receives_outer_values_in_float32(tmp_path: Path) -> None:
    made = Prepared(models.branching(), tmp_path).into_precision(Precision.FP16)
    assert operators(made.path) == ["Cast", "MatMul", "Cast", "ReduceSum", "Greater", "If"]


def test_constants_of_nodes_are_rounded_once(tmp_path: Path) -> None:
    proto = model(
        [node("Constant", "", "w", value=weights("", 4, 4)), node("MatMul", "x w", "y")],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
    )
    made = Prepared(proto, tmp_path).into_precision(Precision.FP16)
    assert operators(made.path) == ["Cast", "MatMul", "Cast"]


def test_names_of_halves_are_their_own(tmp_path: Path) -> None:
    proto = model(
        [node("MatMul", "x w", "x.fp16"), node("MatMul", "x.fp16 w", "y")],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
        [weights("w", 4, 4)],
    )
    made = Prepared(proto, tmp_path).into_precision(Precision.FP16)
    checker.check_model(made.path, full_check=True)


def test_a_value_that_is_output_and_input_has_both_types(tmp_path: Path) -> None:
    proto = model(
        [node("MatMul", "x w", "h"), node("MatMul", "h w", "y")],
        [value("x", [1, 4])],
        [value("h", [1, 4]), value("y", [1, 4])],
        [weights("w", 4, 4)],
    )
    made = Prepared(proto, tmp_path).into_precision(Precision.FP16)
    assert operators(made.path) == ["Cast", "MatMul", "MatMul", "Cast", "Cast"]


def test_bf16_has_a_twin_that_rounds_alike_where_bf16_does_not_run(tmp_path: Path) -> None:
    prepared = Prepared(models.mlp(), tmp_path)
    made = prepared.into_precision(Precision.BF16)
    assert made.path != made.cpu_path
    with pytest.raises(BuildFailed, match="implementation"):
        CpuSession(made.path, prepared.normal.outputs, BuildStage.TRANSFORM)
    assert made.comparison is not None
    assert 1e-4 < made.comparison.worst_accuracy.rel_l2 < 2e-2


def test_int8_quantises_products_per_channel(tmp_path: Path) -> None:
    made = Prepared(models.cnn(), tmp_path).into_precision(Precision.INT8)
    assert {"QuantizeLinear", "DequantizeLinear"} < set(operators(made.path))
    scales = {
        tensor.name: list(tensor.dims) for tensor in onnx.load(made.path).graph.initializer if "k1" in tensor.name
    }
    assert [4] in scales.values()


def test_int8_for_tensorrt_quantises_only_inputs_of_products_and_no_bias(tmp_path: Path) -> None:
    """Regression: TensorRT rejects a DequantizeLinear of int32, which each product with a bias had."""
    made = Prepared(models.cnn(), tmp_path).into_precision(Precision.INT8)
    graphs = {path: onnx.load(path).graph for path in (made.path, made.cpu_path)}
    quantised_after: dict[Path, set[str]] = {}
    has_int32_scales: dict[Path, bool] = {}
    for path, graph in graphs.items():
        maker = {output: each.op_type for each in graph.node for output in each.output}
        quantised_after[path] = {
            maker.get(each.input[0], "") for each in graph.node if each.op_type == "QuantizeLinear"
        }
        stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
        has_int32_scales[path] = any(
            stored.get(each.input[0]) == TensorProto.INT32 for each in graph.node if each.op_type == "DequantizeLinear"
        )
    assert not quantised_after[made.path] & {"Conv", "Gemm", "MatMul"}
    assert quantised_after[made.cpu_path] & {"Conv", "Gemm", "MatMul"}, "ONNX Runtime fuses only such products"
    assert has_int32_scales == {made.path: False, made.cpu_path: True}


def test_int8_for_one_kind_of_engine_uses_one_graph(tmp_path: Path) -> None:
    prepared = Prepared(models.cnn(), tmp_path)
    for on_gpu in (True, False):
        made = transform(
            prepared.normal, Precision.INT8, prepared.cases, reference=prepared.reference,
            tolerance=TOLERANCES[Precision.INT8], into=prepared.into / str(on_gpu), on_gpu=on_gpu, on_cpu=not on_gpu,
        )  # fmt: skip
        assert made.path == made.cpu_path


@pytest.mark.parametrize("opset", [9, 11, 12])
def test_int8_accepts_a_model_of_an_opset_with_one_scale_for_all_channels(opset: int, tmp_path: Path) -> None:
    """Constants in the form that exporters have used for years."""
    proto = models.cnn()
    proto.opset_import[0].version = opset
    made = Prepared(proto, tmp_path).into_precision(Precision.INT8)
    assert {"QuantizeLinear", "DequantizeLinear"} < set(operators(made.path))


def test_int8_weights_that_nodes_share_run_where_products_are_exact(tmp_path: Path) -> None:
    """A shared weight, as in tied layers or in detector heads that run on several maps."""
    proto = model(
        [node("MatMul", "x w", "h"), node("Relu", "h", "r"), node("MatMul", "r w", "y")],
        [value("x", ["N", 8])],
        [value("y", ["N", 8])],
        [weights("w", 8, 8)],
    )
    prepared = Prepared(proto, tmp_path)
    made = prepared.into_precision(Precision.INT8)
    CpuSession(made.path, prepared.normal.outputs, BuildStage.VERIFY, has_integer_products=True)  # optimized


def test_int8_names_the_needed_opset_of_an_unconvertible_model(tmp_path: Path) -> None:
    proto = models.cnn()
    proto.opset_import[0].version = 8
    with pytest.raises(BuildFailed, match=r"int8 needs opset 13, .* opset 8 .*opset_version=13"):
        Prepared(proto, tmp_path).into_precision(Precision.INT8)


def test_a_model_that_the_converter_rejects_is_lowered_in_its_own_opset(tmp_path: Path) -> None:
    """It does not support sparse constants."""
    proto = model(
        [node("MatMul", "x w", "h"), node("MatMul", "x v", "k"), node("Add", "h k", "y")],
        [value("x", [1, 4])],
        [value("y", [1, 4])],
        [weights("v", 4, 4)],
    )
    places = constant("places", [0, 5, 10, 15], np.int64)
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(constant("w", [1, 2, 3, 4]), places, [4, 4]))
    made = Prepared(proto, tmp_path).into_precision(Precision.BF16)
    assert made.summary == "1 nodes in bf16"


def test_a_model_without_products_has_nothing_to_quantise(tmp_path: Path) -> None:
    prepared = Prepared(models.texts(), tmp_path)
    made = prepared.into_precision(Precision.INT8)
    assert (made.path, made.summary.partition(":")[0]) == (prepared.normal.path, "unchanged")


def test_int8_leaves_nodes_after_those_that_their_bodies_need(tmp_path: Path) -> None:
    bodies = {
        name: helper.make_graph([node("Identity", "size", f"{name}_y")], name, [], [value(f"{name}_y", None)])
        for name in ("then_branch", "else_branch")
    }
    proto = model(
        [
            node("MatMul", "x w", "h"),
            node("Shape", "h", "shape"),
            node("Cast", "shape", "size", to=TensorProto.FLOAT),
            node("If", "flag", "y", **bodies),
        ],
        [value("x", [1, 4])],
        [value("y", [2]), value("h", [1, 4])],
        [weights("w", 4, 4), constant("flag", True, bool)],
    )
    checker.check_model(Prepared(proto, tmp_path).into_precision(Precision.INT8).path)


def test_int8_accepts_a_model_that_returns_an_input_of_its_products(tmp_path: Path) -> None:
    proto = model(
        [node("MatMul", "x w", "y")],
        [value("x", ["N", 8])],
        [value("y", ["N", 4]), value("x", ["N", 8])],
        [weights("w", 8, 4)],
    )
    prepared = Prepared(proto, tmp_path)
    made = prepared.into_precision(Precision.INT8)
    assert {"QuantizeLinear", "DequantizeLinear"} < set(operators(made.path))
    given = np.linspace(-3, 3, 16, dtype=np.float32).reshape(2, 8)
    outputs = CpuSession(made.path, prepared.normal.outputs, BuildStage.VERIFY).run({"x": given})
    assert np.array_equal(outputs["x"], given)


def test_int8_without_samples_is_refused(tmp_path: Path) -> None:
    prepared = Prepared(models.mlp(), tmp_path)
    prepared.cases = [Case(case.name, case.inputs) for case in prepared.cases]
    with pytest.raises(BuildFailed, match=r"int8 .*samples= \(--samples\)$"):
        prepared.into_precision(Precision.INT8)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16, Precision.INT8])
def test_constants_too_many_for_one_file_lie_beside_it(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufn_builder.precision.conversion._INLINE_BYTES", 64)
    proto = model([node("MatMul", "x w", "y")], [value("x", [2, 64])], [value("y", [2, 64])], [weights("w", 64, 64)])
    made = Prepared(proto, tmp_path).into_precision(precision)
    assert made.path.stat().st_size < 3000
    assert sum(path.stat().st_size for path in made.path.parent.glob(f"{precision}*")) > 4096


def test_each_conversion_each_run_and_each_comparison_of_values_is_a_step(tmp_path: Path) -> None:
    """Regression: only the start of the stage was progress, so a build of a large model ended."""
    prepared = Prepared(models.outlier(), tmp_path)
    steps: list[str] = []
    made = prepared.into_precision(Precision.INT8, on_step=steps.append)
    assert made.kept
    conversions = 2 * 2  # each for the GPU and the CPU
    for case in prepared.cases:
        assert steps.count(f"calibration with {case.name}") == conversions
        assert steps.count(case.name) >= 2
    assert steps.count("conversion to int8") == 2
    assert sum(step.endswith("values") for step in steps) == 2
    assert any(step.endswith(made.kept[0]) for step in steps)
