from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from gpufn_builder.onnx_model.ingest import IngestLimits, ingest
from gpufn_builder.onnx_model.normalise import NormalModel, normalise
from gpufn_core.errors import BuildFailed
from gpufn_core.inference.ort_integers import EXACT
from gpufn_core.spec.model_spec import Precision, TensorSpec
from tests.builder import models
from tests.builder.models import externalise, mlp, model, node, put, spec_of, value


def _rounded(element: int) -> ModelProto:
    """A product of floats that are first rounded to steps of this type."""
    return model(
        [
            node("QuantizeLinear", "x step zero", "q"),
            node("DequantizeLinear", "q step zero", "d"),
            node("MatMul", "d w", "y"),
        ],
        [value("x", ["N", 4])],
        [value("y", ["N", 4])],
        [
            models.constant("step", 0.1),
            models.constant("zero", 0, helper.tensor_dtype_to_np_dtype(element)),
            models.weights("w", 4, 4),
        ],
        opset=21,
    )


def normal(proto: ModelProto, tmp_path: Path) -> NormalModel:
    put(proto, tmp_path / "upload")
    into = tmp_path / "normal"
    into.mkdir()
    return normalise(ingest(tmp_path / "upload", spec_of(tmp_path / "upload"), IngestLimits()), into)


def test_inputs_and_outputs_have_the_datatypes_of_the_protocol(tmp_path: Path) -> None:
    found = normal(models.several_outputs(), tmp_path)
    assert found.inputs == (TensorSpec("x", "FP32", (-1, 4)),)
    assert found.outputs == (
        TensorSpec("logits", "FP32", (-1, 3)),
        TensorSpec("label", "INT64", (-1,)),
        TensorSpec("above", "BOOL", (-1, 3)),
    )


def test_texts_are_bytes(tmp_path: Path) -> None:
    assert [spec.datatype for spec in normal(models.texts(), tmp_path).inputs] == ["BYTES", "BYTES"]


@pytest.mark.parametrize(
    ("proto", "arithmetic"),
    [
        (mlp(), Precision.FP32),
        (mlp(element=TensorProto.FLOAT16), Precision.FP16),
        (mlp(element=TensorProto.BFLOAT16), Precision.BF16),
        (_rounded(TensorProto.INT8), Precision.INT8),
        (_rounded(TensorProto.UINT8), Precision.INT8),
        (_rounded(TensorProto.UINT16), Precision.FP32),
        (
            model(
                [
                    node("Cast", "x", "half", to=TensorProto.FLOAT16),
                    node("Add", "half half", "sum"),
                    node("Cast", "sum", "y", to=TensorProto.FLOAT),
                ],
                [value("x", [2])],
                [value("y", [2])],
            ),
            Precision.FP16,
        ),
    ],
)
def test_the_coarsest_arithmetic_of_a_model_is_seen_wherever_it_is(
    proto: ModelProto, arithmetic: Precision, tmp_path: Path
) -> None:
    assert normal(proto, tmp_path).arithmetic is arithmetic


def test_shapes_of_the_values_between_are_inferred(tmp_path: Path) -> None:
    inferred = onnx.load(normal(mlp(), tmp_path).path).graph.value_info
    assert {each.name: each.type.tensor_type.shape.dim[1].dim_value for each in inferred} == {
        "h": 16,
        "hb": 16,
        "r": 16,
    }


def test_the_version_of_a_file_format_that_is_too_new_is_lowered(tmp_path: Path) -> None:
    proto = mlp()
    proto.ir_version = onnx.IR_VERSION
    onnxruntime.InferenceSession(normal(proto, tmp_path).path, providers=["CPUExecutionProvider"])


def _with_threshold(data: object, *, ir_version: int = 8) -> ModelProto:
    """y = x @ w + threshold, where the threshold is an input with an initializer."""
    threshold = models.constant("threshold", data)
    proto = model(
        [node("MatMul", "x w", "product"), node("Add", "product threshold", "y")],
        [value("x", ["N", 4]), value("threshold", list(threshold.dims))],
        [value("y", ["N", 4])],
        [models.weights("w", 4, 4), threshold],
    )
    proto.ir_version = ir_version
    return proto


def test_an_input_that_has_an_initialiser_is_optional(tmp_path: Path) -> None:
    found = normal(_with_threshold(0.5), tmp_path)
    default = np.array(0.5, np.float32).tobytes()
    assert found.inputs == (TensorSpec("x", "FP32", (-1, 4)), TensorSpec("threshold", "FP32", (), default))
    session = onnxruntime.InferenceSession(found.path, providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["x", "threshold"]


@pytest.mark.parametrize(
    ("data", "ir_version"),
    [([0.5] * 4, 3), (np.zeros((512, 4)).tolist(), 8)],
    ids=["an old format, in which each initialiser is an input", "as large as weights"],
)
def test_an_initialiser_that_is_no_parameter_stays_a_constant(data: object, ir_version: int, tmp_path: Path) -> None:
    proto = _with_threshold(data, ir_version=ir_version)
    if ir_version == 3:
        proto.graph.input.append(value("w", [4, 4]))
    assert [spec.name for spec in normal(proto, tmp_path).inputs] == ["x"]


def test_weights_that_an_old_exporter_lists_as_inputs_stay_constants(tmp_path: Path) -> None:
    proto = _with_threshold(0.5)
    proto.graph.initializer[0].CopyFrom(models.weights("w", 4, 5))
    proto.graph.input.append(value("w", [4, 5]))
    proto.graph.output[0].CopyFrom(value("y", ["N", 5]))
    assert [spec.name for spec in normal(proto, tmp_path).inputs] == ["x"]


def test_inputs_that_have_a_constant_are_no_inputs(tmp_path: Path) -> None:
    proto = mlp()
    proto.ir_version = 3
    proto.graph.input.extend(value(each.name, list(each.dims)) for each in proto.graph.initializer)
    found = normal(proto, tmp_path)
    assert [spec.name for spec in found.inputs] == ["x"]
    onnxruntime.InferenceSession(found.path, providers=["CPUExecutionProvider"])


def test_functions_are_written_out_and_their_domains_forgotten(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", models.OPSET), helper.make_opsetid("own", 1)]
    function = helper.make_function("own", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], opsets[:1])
    proto = model([node("Twice", "x", "y", domain="own")], [value("x", [2])], [value("y", [2])], functions=[function])
    proto.opset_import.append(opsets[1])
    found = onnx.load(normal(proto, tmp_path).path)
    assert [each.op_type for each in found.graph.node] == ["Add"]
    assert [each.domain for each in found.opset_import] == [""]


@pytest.mark.parametrize(
    ("body", "written"),
    [
        (node("Neg", "a", "b"), ["Neg"]),
        (node("Squeeze", "a", "b", axes=[0]), ["Constant", "Squeeze"]),  # an attribute in that opset, an input today
    ],
)
def test_a_function_of_another_opset_is_written_out_in_that_of_the_model(
    body: NodeProto, written: list[str], tmp_path: Path
) -> None:
    function = helper.make_function("own", "Call", ["a"], ["b"], [body], [helper.make_opsetid("", 11)])
    proto = model([node("Call", "x", "y", domain="own")], [value("x", [1])], [value("y", None)], functions=[function])
    proto.opset_import.append(helper.make_opsetid("own", 1))
    found = normal(proto, tmp_path)
    assert [each.op_type for each in onnx.load(found.path).graph.node] == written
    onnxruntime.InferenceSession(found.path, providers=["CPUExecutionProvider"])


def test_an_unused_opset_is_removed_even_if_it_is_new(tmp_path: Path) -> None:
    proto = mlp()
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 99))
    found = normal(proto, tmp_path)
    assert [opset.domain for opset in onnx.load(found.path).opset_import] == [""]
    onnxruntime.InferenceSession(found.path, providers=["CPUExecutionProvider"])


def test_external_data_lie_beside_the_normal_model(tmp_path: Path) -> None:
    proto = mlp()
    (tmp_path / "upload").mkdir()
    externalise(proto, tmp_path / "upload")
    found = normal(proto, tmp_path)
    assert found.external == ("weights.bin",)
    session = onnxruntime.InferenceSession(found.path, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.ones((1, 8), np.float32)})[0].shape == (1, 4)


def test_the_names_of_external_data_are_theirs(tmp_path: Path) -> None:
    folder = tmp_path / "upload"
    folder.mkdir()
    proto = mlp()
    externalise(proto, folder, location="model.onnx")
    (folder / "net.onnx").write_bytes(proto.SerializeToString())
    spec = spec_of(folder)
    (tmp_path / "normal").mkdir()
    source = ingest(folder, type(spec)(parameter="m", files=spec.files[::-1]), IngestLimits())
    assert normalise(source, tmp_path / "normal").path.name == "_model.onnx"


@pytest.mark.parametrize(
    ("rows", "is_batched"),
    [
        (["N", "N", "N"], True),
        ([None, None, None], True),
        (["N", "N", "other"], True),  # a name that converters use for unknown sizes
        (["N", None, "N"], True),
        (["N", "M", "N"], False),
        ([-1, -1, -1], True),  # the form of other converters
        ([-1, "N", -1], True),
        (["N", 4, "N"], False),
        (["N", "N", 4], False),
        ([4, 4, 4], False),
    ],
)
def test_a_first_dimension_that_may_count_rows(rows: list[int | str | None], is_batched: bool, tmp_path: Path) -> None:
    first, second, result = rows
    proto = model(
        [node("Add", "a b", "y")], [value("a", [first, 2]), value("b", [second, 2])], [value("y", [result, 2])]
    )
    assert normal(proto, tmp_path).batched is is_batched


def test_a_graph_that_is_not_valid_names_the_node(tmp_path: Path) -> None:
    proto = model([node("Conv", "x", "y")], [value("x", [1, 1, 4])], [value("y", None)])
    with pytest.raises(BuildFailed) as caught:
        normal(proto, tmp_path)
    assert (caught.value.stage, caught.value.node) == ("normalise", "y_node")
    assert "not valid ONNX: " in caught.value.message
    assert "\n" not in caught.value.message


def test_an_operator_that_does_not_exist_is_not_valid(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="Nonsense"):
        normal(model([node("Nonsense", "x", "y")], [value("x", [1])], [value("y", [1])]), tmp_path)


def test_a_constant_with_less_data_than_declared_is_invalid(tmp_path: Path) -> None:
    proto = mlp()
    proto.graph.initializer[0].raw_data = bytes(8)
    with pytest.raises(BuildFailed) as caught:
        normal(proto, tmp_path)
    assert caught.value.stage == "normalise"


def test_the_upload_stays_unchanged(tmp_path: Path) -> None:
    proto = mlp()
    proto.training_info.add()
    normal(proto, tmp_path)
    assert (tmp_path / "upload" / "model.onnx").read_bytes() == proto.SerializeToString()


def test_nodes_follow_their_inputs_and_others_keep_their_place(tmp_path: Path) -> None:
    body = helper.make_graph([node("Neg", "c", "b"), node("Abs", "h", "c")], "body", [], [value("b", [2])])
    late = [node("If", "flag", "y", then_branch=body, else_branch=body), node("Abs", "g", "h"), node("Neg", "x", "g")]
    constants = [models.constant("flag", True, bool)]
    found = normal(model(late, [value("x", [2])], [value("y", [2])], constants), tmp_path)
    graph = onnx.load(found.path).graph
    assert [each.op_type for each in graph.node] == ["Neg", "Abs", "If"]
    assert [each.op_type for each in graph.node[2].attribute[0].g.node] == ["Abs", "Neg"]
    before = [each.name for each in models.encoder().graph.node]
    (tmp_path / "other").mkdir()
    assert [each.name for each in onnx.load(normal(models.encoder(), tmp_path / "other").path).graph.node] == before


@pytest.mark.parametrize("imported", ["", "ai.onnx"])
def test_a_graph_without_a_name_and_nodes_of_the_main_domains_other_name_are_taken(
    imported: str, tmp_path: Path
) -> None:
    proto = model([node("Neg", "x", "y", domain="ai.onnx")], [value("x", [2])], [value("y", [2])])
    proto.graph.name = ""
    proto.opset_import[0].domain = imported
    onnxruntime.InferenceSession(normal(proto, tmp_path).path, providers=["CPUExecutionProvider"])


def test_a_node_that_needs_itself_is_named(tmp_path: Path) -> None:
    proto = model([node("Neg", "h", "y"), node("Neg", "y", "h")], [value("x", [2])], [value("y", [2])])
    with pytest.raises(BuildFailed, match="topologically sorted") as caught:
        normal(proto, tmp_path)
    assert caught.value.node == "y_node"


@pytest.mark.parametrize(("block_size", "shape"), [(0, (8,)), (32, (2, 8))])
@pytest.mark.parametrize("is_node", [False, True])
def test_zero_points_of_several_scales_are_written_out_so_that_exact_products_run(
    block_size: int, shape: tuple[int, ...], is_node: bool, tmp_path: Path
) -> None:
    proto = models.weights_of_few_bits(TensorProto.INT8, block_size)
    if is_node:
        constants = [node("Constant", "", tensor.name, value=tensor) for tensor in proto.graph.initializer]
        nodes = [*constants, *proto.graph.node]
        del proto.graph.initializer[:], proto.graph.node[:]
        proto.graph.node.extend(nodes)
    found = normal(proto, tmp_path)
    graph = onnx.load(found.path).graph
    [zeros] = [tensor for tensor in graph.initializer if tensor.name == "w.gpufn_zero_point"]
    assert (tuple(zeros.dims), zeros.data_type) == (shape, TensorProto.INT8)
    options = onnxruntime.SessionOptions()
    for entry, setting in EXACT.items():
        options.add_session_config_entry(entry, setting)
    session = onnxruntime.InferenceSession(found.path, options, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.ones((1, 64), np.float32)})[0].shape == (1, 8)


def test_int8_weights_and_zero_points_that_nodes_share_become_their_own_so_that_exact_products_run(
    tmp_path: Path,
) -> None:
    proto = model(
        [
            node("DequantizeLinear", "integers scale zero", "w"),
            node("DequantizeLinear", "others scale zero", "v"),
            node("QuantizeLinear", "x scale zero", "xq"),
            node("DequantizeLinear", "xq scale zero", "xd"),
            *(node("MatMul", f"xd {name}", made) for name, made in (("w", "a"), ("w", "b"), ("v", "c"))),
            node("Sum", "a b c", "y"),
        ],
        [value("x", ["N", 4])],
        [value("y", ["N", 4])],
        [
            models.constant("integers", np.full((4, 4), 3), np.int8), models.constant("others", np.eye(4), np.int8),
            models.constant("scale", 0.5), models.constant("zero", 0, np.int8),
        ],
    )  # fmt: skip
    found = normal(proto, tmp_path)
    weights = [each for each in onnx.load(found.path).graph.node if each.op_type == "DequantizeLinear"]
    own = [name for each in weights if each.input[0] != "xq" for name in (each.input[0], each.input[2])]
    assert len(own) == len(set(own)) == 6
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    for entry, setting in EXACT.items():
        options.add_session_config_entry(entry, setting)
    session = onnxruntime.InferenceSession(found.path, options, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.ones((1, 4), np.float32)})[0].tolist() == [[12.5] * 4]


@pytest.mark.parametrize("own", [True, False])
def test_int8_weights_of_branches_are_written_out_in_the_branches(own: bool, tmp_path: Path) -> None:
    proto = models.integers_in_branches(own=own)
    as_it_is = onnxruntime.SessionOptions()
    as_it_is.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    exact = onnxruntime.SessionOptions()
    exact.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    for entry, setting in EXACT.items():
        exact.add_session_config_entry(entry, setting)
    wanted = onnxruntime.InferenceSession(proto.SerializeToString(), as_it_is, providers=["CPUExecutionProvider"])
    found = onnxruntime.InferenceSession(normal(proto, tmp_path).path, exact, providers=["CPUExecutionProvider"])
    for sign in (1, -1):
        x = sign * np.linspace(0.1, 1, 64, dtype=np.float32)[np.newaxis]
        np.testing.assert_allclose(found.run(None, {"x": x})[0], wanted.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5)
