from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from gpufn_builder.onnx_model import ort_capabilities
from gpufn_builder.onnx_model.ingest import IngestLimits, SourceModel, ingest
from gpufn_core.errors import BuildFailed
from tests.builder import models
from tests.builder.models import constant, externalise, mlp, model, node, put, refer, spec_of, value

LIMITS = IngestLimits()


def look(folder: Path, limits: IngestLimits = LIMITS) -> SourceModel:
    return ingest(folder, spec_of(folder), limits)


def refusal(folder: Path, limits: IngestLimits = LIMITS) -> BuildFailed:
    with pytest.raises(BuildFailed) as caught:
        look(folder, limits)
    assert caught.value.stage == "ingest"
    return caught.value


@pytest.mark.parametrize("make", [models.mlp, models.cnn, models.encoder, models.texts, models.branching])
def test_a_good_model_passes(make: Callable[[], ModelProto], tmp_path: Path) -> None:
    put(make(), tmp_path)
    assert look(tmp_path).path == tmp_path / "model.onnx"


def test_a_model_without_inputs_passes(tmp_path: Path) -> None:
    put(model([node("Identity", "c", "y")], [], [value("y", [1])], [constant("c", [1.0])]), tmp_path)
    assert look(tmp_path).nodes == 1


def test_external_data_beside_the_model_pass(tmp_path: Path) -> None:
    proto = mlp()
    externalise(proto, tmp_path)
    put(proto, tmp_path)
    assert look(tmp_path).external == ("weights.bin",)


# --- other formats ---------------------------------------------------------------------------------------------------


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pickle.dumps({"weights": [1.0]}), "a pickle, which is a program and never loaded here"),
        (_zip(), "a zip archive, as PyTorch, Keras and numpy write them"),
        (b"\x89HDF\r\n\x1a\n" + bytes(64), "an HDF5 file"),
        ((9).to_bytes(8, "little") + b'{"a":{}} ' + bytes(8), "a safetensors file"),
        (bytes(4) + b"TFL3" + bytes(64), "a TensorFlow Lite model"),
        (b"GGUF" + bytes(64), "a GGUF file"),
        (b"<!doctype html><html></html>", "text, such as JSON or HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "a Git LFS pointer"),
    ],
)
def test_another_format_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    put(data, tmp_path)
    message = refusal(tmp_path).message
    assert words in message
    assert message.endswith("to ONNX")


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x7a" * 100, np.arange(100, dtype=np.float32).tobytes()])
def test_bytes_that_are_nothing_known_are_refused(data: bytes, tmp_path: Path) -> None:
    put(data, tmp_path)
    assert "model.onnx is not" in refusal(tmp_path).message


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    put(b"", tmp_path)
    assert refusal(tmp_path).message == "model.onnx is empty"


def test_a_truncated_file_reports_the_missing_bytes(tmp_path: Path) -> None:
    put(mlp().SerializeToString()[:-100], tmp_path)
    assert refusal(tmp_path).message.startswith("model.onnx is truncated: ")


def test_a_file_cut_off_between_its_parts_is_no_whole_model(tmp_path: Path) -> None:
    whole = ModelProto(ir_version=8, producer_name="tests")
    put(whole.SerializeToString(), tmp_path)
    assert refusal(tmp_path).message.endswith("no graph or no opset")


def test_a_file_damaged_within_is_refused(tmp_path: Path) -> None:
    data = bytearray(mlp().SerializeToString())
    data[40:80] = b"\xff" * 40
    put(bytes(data), tmp_path)
    assert "is damaged" in refusal(tmp_path).message


# --- external data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "location",
    ["../weights.bin", "sub/weights.bin", "./weights.bin", "..", "", "a\\weights.bin", "*/_ORT_MEM_ADDR_/*"],
)
def test_a_location_that_is_no_plain_name_is_refused(location: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / "weights.bin").write_bytes(bytes(4096))
    proto = mlp()
    refer(proto.graph.initializer[0], location)
    put(proto, tmp_path)
    assert re.match(rf"w1: .* {re.escape(repr(location))} is not a plain", refusal(tmp_path).message)


def test_an_absolute_location_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(4096))
    proto = mlp()
    refer(proto.graph.initializer[0], str(tmp_path / "weights.bin"))
    put(proto, tmp_path)
    assert "not a plain file" in refusal(tmp_path).message


def test_a_file_that_was_not_uploaded_is_refused_even_when_it_is_there(tmp_path: Path) -> None:
    proto = mlp()
    refer(proto.graph.initializer[0], "weights.bin")
    put(proto, tmp_path)
    spec = spec_of(tmp_path)
    (tmp_path / "weights.bin").write_bytes(bytes(4096))
    with pytest.raises(BuildFailed, match=r"'weights\.bin' was not uploaded"):
        ingest(tmp_path, spec, LIMITS)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": 1}, "w1: its external data ends at byte 513 of weights.bin, which has 512"),
        ({"length": 513}, "w1: its external data ends at byte 513 of weights.bin, which has 512"),
        ({"offset": "-1"}, "w1: the offset of its external data is '-1'"),
        ({"length": "1e3"}, "w1: the length of its external data is '1e3'"),
        ({"offset": 1 << 70}, f"w1: the offset of its external data is '{1 << 70}'"),
    ],
)
def test_external_data_end_inside_their_file(entries: dict[str, int | str], message: str, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(8 * 16 * 4))
    proto = mlp()
    refer(proto.graph.initializer[0], "weights.bin", **entries)
    put(proto, tmp_path)
    assert refusal(tmp_path).message == message


def test_a_repeated_location_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(4096))
    proto = mlp()
    refer(proto.graph.initializer[0], "weights.bin")
    proto.graph.initializer[0].external_data.add(key="location", value="../weights.bin")
    put(proto, tmp_path)
    assert re.match(r"w1: .*duplicate entry", refusal(tmp_path).message)


def _escaping(name: str = "hidden") -> TensorProto:
    tensor = constant(name, [1.0])
    refer(tensor, "../secret")
    return tensor


def _in_a_subgraph(proto: ModelProto) -> None:
    branch = helper.make_graph([node("Identity", "hidden", "b")], "branch", [], [value("b", [1])], [_escaping()])
    proto.graph.node.append(node("If", "flag", "z", then_branch=branch, else_branch=branch))


def _in_an_attribute(proto: ModelProto) -> None:
    proto.graph.node.append(node("Constant", "", "z", value=_escaping()))


def _in_a_function(proto: ModelProto) -> None:
    proto.functions.append(
        helper.make_function(
            "own", "F", [], ["z"], [node("Constant", "", "z", value=_escaping())], [helper.make_opsetid("", 20)]
        )
    )


def _in_a_sparse_initialiser(proto: ModelProto) -> None:
    indices = constant("indices", [0], np.int64)
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(_escaping(), indices, [4]))


def _in_training(proto: ModelProto) -> None:
    proto.training_info.add().initialization.initializer.append(_escaping())


def _without_the_mark(proto: ModelProto) -> None:
    tensor = _escaping()
    tensor.data_location = TensorProto.DEFAULT
    proto.graph.initializer.append(tensor)


@pytest.mark.parametrize(
    "hide",
    [_in_a_subgraph, _in_an_attribute, _in_a_function, _in_a_sparse_initialiser, _in_training, _without_the_mark],
)
def test_external_data_are_found_wherever_they_hide(hide: Callable[[ModelProto], None], tmp_path: Path) -> None:
    proto = mlp()
    hide(proto)
    put(proto, tmp_path)
    assert re.match(r"hidden: .* '\.\./secret' is not a plain", refusal(tmp_path).message)


@pytest.mark.parametrize(
    ("link", "words"),
    [
        (Path.symlink_to, "weights.bin is a symbolic link"),
        (Path.hardlink_to, "weights.bin is a hard link: another path refers to the same file"),
    ],
)
def test_links_are_refused(link: Callable[[Path, Path], None], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "upload"
    proto = mlp()
    put(proto, folder)
    externalise(proto, folder)
    put(proto, folder)
    spec = spec_of(folder)
    link(folder / "weights.bin", (folder / "weights.bin").rename(tmp_path / "elsewhere"))
    with pytest.raises(BuildFailed) as caught:
        ingest(folder, spec, LIMITS)
    assert caught.value.message == words


def test_a_file_that_is_missing_or_of_another_size_is_refused(tmp_path: Path) -> None:
    put(mlp(), tmp_path)
    (tmp_path / "more.bin").write_bytes(b"123")
    spec = spec_of(tmp_path)
    (tmp_path / "more.bin").write_bytes(b"1234")
    with pytest.raises(BuildFailed, match=r"more\.bin has 4 bytes, not the 3 in the spec"):
        ingest(tmp_path, spec, LIMITS)
    (tmp_path / "more.bin").unlink()
    with pytest.raises(BuildFailed, match=r"more\.bin is missing"):
        ingest(tmp_path, spec, LIMITS)


# --- the graph -------------------------------------------------------------------------------------------------------


def test_a_custom_domain_is_refused_with_its_node(tmp_path: Path) -> None:
    proto = model([node("Magic", "x", "y", domain="com.acme")], [value("x", [1])], [value("y", [1])])
    put(proto, tmp_path)
    error = refusal(tmp_path)
    assert "y_node is com.acme.Magic" in error.message
    assert error.node == "y_node"


def test_a_node_without_a_name_is_named_by_its_output(tmp_path: Path) -> None:
    nameless = helper.make_node("Magic", ["x"], ["y"], domain="com.acme")
    put(model([nameless], [value("x", [1])], [value("y", [1])]), tmp_path)
    assert refusal(tmp_path).node == "Magic -> y"


def _with_functions(depth: int, width: int, closing: str) -> ModelProto:
    """The graph calls f0; each function calls the next `width` times, and the last one calls `closing`."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    functions = []
    for level in range(depth):
        callee, domain = (
            (f"f{level + 1}", "own") if level < depth - 1 else (closing, "own" if closing[0] == "f" else "")
        )
        calls = [node(callee, "a" if i == 0 else f"a{i}", f"a{i + 1}", domain=domain) for i in range(width)]
        functions.append(helper.make_function("own", f"f{level}", ["a"], [f"a{width}"], calls, opsets))
    proto = model([node("f0", "x", "y", domain="own")], [value("x", [1])], [value("y", [1])], functions=functions)
    proto.opset_import.append(opsets[1])
    return proto


def test_the_models_own_functions_count_as_often_as_they_are_called(tmp_path: Path) -> None:
    put(_with_functions(2, 3, "Neg"), tmp_path)
    assert look(tmp_path).nodes == 9


def test_functions_that_grow_without_end_are_refused(tmp_path: Path) -> None:
    put(_with_functions(15, 10, "Neg"), tmp_path)
    assert "more than 200000 nodes" in refusal(tmp_path).message


def test_functions_that_call_themselves_are_refused(tmp_path: Path) -> None:
    put(_with_functions(3, 1, "f1"), tmp_path)
    assert refusal(tmp_path).message == "the function own.f1 calls itself"


@pytest.mark.parametrize("domain", ["", "ai.onnx.ml", "com.microsoft"])
def test_an_opset_that_is_too_new_is_refused_with_both_numbers(domain: str, tmp_path: Path) -> None:
    newest = ort_capabilities.newest_opset(domain)
    op = node("Binarizer", "x", "y", domain=domain) if domain else node("Neg", "x", "y")
    proto = model([op], [value("x", [1])], [value("y", [1])], opset=newest + 1 if not domain else 20)
    if domain:
        proto.opset_import.append(helper.make_opsetid(domain, newest + 1))
    put(proto, tmp_path)
    message = refusal(tmp_path).message
    assert f"opset {newest + 1} of {domain or 'ai.onnx'}," in message
    assert message.endswith(f"opset_version={newest}")


def test_an_opset_of_no_node_is_no_matter(tmp_path: Path) -> None:
    proto = mlp()
    proto.opset_import.append(helper.make_opsetid("com.acme", 99))
    put(proto, tmp_path)
    assert look(tmp_path).nodes == 4


def test_an_input_of_dynamic_rank_is_refused_by_name(tmp_path: Path) -> None:
    put(model([node("Neg", "x", "y")], [value("x", None)], [value("y", None)]), tmp_path)
    assert re.match(r"input x .*number of dimensions", refusal(tmp_path).message)


def test_a_model_without_outputs_is_refused(tmp_path: Path) -> None:
    put(model([node("Neg", "x", "y")], [value("x", [1])], []), tmp_path)
    assert "no output" in refusal(tmp_path).message


@pytest.mark.parametrize("name", ["a\0b", "a" * 1001, "\udcff"], ids=["NUL", "long", "no UTF-8"])
@pytest.mark.parametrize("role", ["input", "output"])
def test_a_name_that_no_request_could_have_is_refused(role: str, name: str, tmp_path: Path) -> None:
    proto = model([node("Neg", "INPUT", "OUTPUT")], [value("INPUT", [1])], [value("OUTPUT", [1])])
    graph = proto.graph
    if name == "\udcff":  # protobuf parses this but never writes it
        data = proto.SerializeToString().replace(role.upper().encode(), b"\xff" * len(role))
    else:
        (graph.node[0].input if role == "input" else graph.node[0].output)[0] = name
        (graph.input if role == "input" else graph.output)[0].name = name
        data = proto.SerializeToString()
    put(data, tmp_path)
    assert f"name of an {role} " in refusal(tmp_path).message


def test_the_name_of_a_node_may_have_any_encoding(tmp_path: Path) -> None:
    proto = model([node("Neg", "x", "y")], [value("x", [1])], [value("y", [1])])
    proto.graph.name = "GRAPH"
    put(proto.SerializeToString().replace(b"y_node", b"\xff_node").replace(b"GRAPH", b"\xff" * 5), tmp_path)
    assert look(tmp_path).nodes == 1
    proto.graph.node[0].domain = "elsewhere"
    put(proto.SerializeToString().replace(b"y_node", b"\xff_node"), tmp_path)
    assert refusal(tmp_path).node == "\ufffd_node"


def test_an_input_of_more_dimensions_than_arrays_have_is_refused(tmp_path: Path) -> None:
    put(model([node("Neg", "x", "y")], [value("x", [1] * 65)], [value("y", None)]), tmp_path)
    assert refusal(tmp_path).message == "input x has 65 dimensions; 64 are allowed"


def test_an_input_larger_than_a_request_can_describe_is_refused(tmp_path: Path) -> None:
    put(model([node("Neg", "x", "y")], [value("x", ["N", 1 << 31])], [value("y", None)]), tmp_path)
    assert re.match(r"input x .* 2147483648; 2147483647 ", refusal(tmp_path).message)


def test_a_tensor_in_segments_is_refused(tmp_path: Path) -> None:
    proto = mlp()
    proto.graph.initializer[0].segment.end = 3
    put(proto, tmp_path)
    assert re.match(r"w1 .*segments", refusal(tmp_path).message)


def test_an_element_type_that_cannot_be_sent_is_refused_by_name(tmp_path: Path) -> None:
    put(model([node("Identity", "x", "y")], [value("x", [1], TensorProto.FLOAT8E5M2)], [value("y", [1])]), tmp_path)
    assert re.match(r"input x .* FLOAT8E5M2", refusal(tmp_path).message)


def test_a_sequence_is_refused_by_name(tmp_path: Path) -> None:
    sequence = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)
    put(model([node("SequenceLength", "x", "y")], [sequence], [value("y", [], TensorProto.INT64)]), tmp_path)
    assert refusal(tmp_path).message.startswith("input x is a sequence")


def test_the_error_of_a_zip_map_names_the_option_that_avoids_it(tmp_path: Path) -> None:
    """A model as tools for scikit-learn write it by default."""
    maps = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    output = helper.make_value_info("p", helper.make_sequence_type_proto(maps))
    zipped = node("ZipMap", "x", "p", domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    put(model([zipped], [value("x", ["N", 2])], [output]), tmp_path)
    message = refusal(tmp_path).message
    assert message.startswith("output p is a sequence")
    assert message.endswith("options={'zipmap': False}")


def test_a_tensor_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    proto = mlp()
    proto.graph.initializer.append(TensorProto(name="vast", data_type=TensorProto.FLOAT, dims=[1 << 30, 1 << 30]))
    put(proto, tmp_path)
    assert refusal(tmp_path).message == f"vast has {1 << 60} elements; {1 << 34} are allowed"


def test_a_negative_size_is_refused(tmp_path: Path) -> None:
    proto = mlp()
    proto.graph.initializer.append(TensorProto(name="odd", data_type=TensorProto.FLOAT, dims=[-1, -1]))
    put(proto, tmp_path)
    assert re.match(r"odd .* \[-1, -1\]$", refusal(tmp_path).message)


def test_graphs_that_lie_too_deep_in_each_other_are_refused(tmp_path: Path) -> None:
    inner = helper.make_graph([node("Identity", "x", "b")], "inner", [], [value("b", [1])])
    for _ in range(4):
        nest = node("If", "flag", "b", then_branch=inner, else_branch=inner)
        inner = helper.make_graph([nest], "outer", [], [value("b", [1])])
    inner.input.extend([value("x", [1]), value("flag", [], TensorProto.BOOL)])
    put(helper.make_model(inner), tmp_path)
    message = refusal(tmp_path, IngestLimits(nesting=4)).message
    assert message == "graphs are nested 5 deep; 4 are allowed"


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (IngestLimits(model_bytes=100), "and 100 are allowed: keep weights as external data"),
        (IngestLimits(total_bytes=500), "bytes together, and 500 are allowed"),
        (IngestLimits(nodes=3), "the model has more than 3 nodes"),
    ],
)
def test_limits_hold(limits: IngestLimits, words: str, tmp_path: Path) -> None:
    put(mlp(), tmp_path)
    assert words in refusal(tmp_path, limits).message
