"""`Model`: the options it refuses, the files it uploads, and local calls of a function with a model."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from gpufn import Model, enter, gpu_function, method
from gpufn.deploy.model_files import external_data, file_of, folder_of, prepare
from gpufn.testing import run_locally
from gpufn_core.errors import InvalidInput, InvalidSpec
from gpufn_core.spec.model_spec import ModelFile, ModelSpec, Precision, ShapeProfile, ShapeRange, TensorSpec, Tolerance

_ONE = ShapeRange((1, 3), (1, 3), (1, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "net.pt"}, "'net.pt' is not an ONNX file (.onnx); `gpufn build app.py:make_model` exports"),
        ({"path": 3}, "path is a file path, not 3"),
        ({"precision": "fp8"}, "precision is fp32, tf32, fp16, bf16 or int8, not 'fp8'"),
        ({"precision": "int8"}, "model: precision int8 is calibrated on samples: set samples="),
        ({"max_batch": 0}, "model: max_batch is a number from 1 to 65536, not 0"),
        ({"max_batch": 1.5}, "max_batch is an integer, not 1.5"),
        ({"shapes": [1, 3]}, 'shapes is a dict of inputs and shapes, such as {"x": (1, 3, 224, 224)}, not [1, 3]'),
        (
            {"shapes": {"x": ((1, 3), (2, 3))}},
            "shapes['x'] is one shape, or three: the smallest, the usual and the largest",
        ),
        ({"shapes": {"x": ((4, 3), (2, 3), (8, 3))}}, "shapes['x']: a shape range is min <= opt <= max"),
        ({"shapes": {"x": ((1,), (2, 3), (8, 3))}}, "shapes['x']: min (1,), opt (2, 3) and max (8, 3) differ"),
        ({"shapes": {"x": (1, 1 << 70)}}, "a shape range is min <= opt <= max <= 2147483647 in each dimension"),
        ({"tolerance": {"rel_l2": -0.1}}, "tolerance: rel_l2 is 0 or more, not -0.1"),
        ({"tolerance": {"cosine": 1.5}}, "tolerance: cosine is from -1 to 1, not 1.5"),
        ({"samples": "s.pkl"}, "samples is an .npz or .safetensors file, not 's.pkl'"),
        ({"tolerance": {"l2": 1.0}}, "tolerance is a dict of atol, rtol, max_abs, rel_l2 and cosine, not {'l2': 1.0}"),
        ({"allow_cpu": "yes"}, "allow_cpu is True or False, not 'yes'"),
        ({"verify": 0}, "verify is True or False, not 0"),
        ({"files": "weights.bin"}, "files is a list of paths, not 'weights.bin'"),
        ({"build_timeout": 0}, "build_timeout is a number of seconds from 1 to 86400, not 0"),
        ({"build_timeout": float("nan")}, "build_timeout is a number of seconds from 1 to 86400, not nan"),
        ({"build_timeout": "1h"}, "build_timeout is a number of seconds, not '1h'"),
        ({"build_memory": "much"}, "'much' is not a memory size"),
        ({"build_memory": 2}, "build_memory is 2 bytes, and a process that compiles needs at least 16 MiB: write"),
        ({"build_memory": 1 << 70}, "a memory size is less than 8 EiB, not 1180591620717411303424"),
        ({"build_memory": "9" * 400}, "a memory size is less than 8 EiB, not '999"),
    ],
)
def test_a_wrong_option_is_refused_at_the_declaration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        Model(**{"path": "net.onnx"} | options)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("limit", [0, -1, 1 << 63])
def test_a_spec_of_another_client_needs_a_possible_memory_limit(limit: int) -> None:
    with pytest.raises(InvalidSpec, match=r"^net: memory_limit_bytes .*8 EiB"):
        ModelSpec(parameter="net", files=(ModelFile("net.onnx", "0" * 64, 1),), memory_limit_bytes=limit)


def test_options_become_the_spec(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"onnx")
    (tmp_path / "s.npz").write_bytes(b"samples")
    model = Model(
        "net.onnx",
        precision="int8",
        max_batch=8,
        shapes={"x": (1, 3), "y": ((1, 3), (2, 3), (8, 3))},
        samples="s.npz",
        tolerance={"cosine": 0.9},
        verify=False,
        allow_cpu=True,
        build_timeout=60,
        build_memory="2Gi",
    )
    spec, paths = prepare("net", model, tmp_path)
    assert (spec.parameter, spec.precision, spec.max_batch, spec.allow_cpu) == ("net", Precision.INT8, 8, True)
    assert not spec.verify
    assert spec.profiles == (ShapeProfile({"x": _ONE, "y": ShapeRange((1, 3), (2, 3), (8, 3))}),)
    assert (spec.tolerance, spec.build_timeout_s, spec.memory_limit_bytes) == (Tolerance(cosine=0.9), 60.0, 2 << 30)
    assert spec.samples == file_of(tmp_path / "s.npz")
    assert {path.name for path in paths.values()} == {"net.onnx", "s.npz"}


def _onnx_with_external_data(folder: Path, *locations: str) -> Path:
    onnx = pytest.importorskip("onnx")
    tensors = []
    for number, location in enumerate(locations):
        tensor = onnx.TensorProto(name=f"w{number}", data_type=1, dims=[1])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        tensor.external_data.add(key="length", value="4")
        tensors.append(tensor)
        if "/" not in location:
            (folder / location).write_bytes(b"abcd")
    graph = onnx.helper.make_graph([], "g", [], [], initializer=tensors)
    path = folder / "net.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return path


def test_external_data_is_detected_and_uploaded(tmp_path: Path) -> None:
    long = "encoder." + "layer." * 30 + "weight"  # its length takes two bytes
    path = _onnx_with_external_data(tmp_path, "net.onnx.data", "net.onnx.data", long)
    assert external_data(path) == ["net.onnx.data", long]
    spec, paths = prepare("net", Model("net.onnx"), tmp_path)
    assert [file.name for file in spec.files] == ["net.onnx", "net.onnx.data", long]
    assert [file.size for file in spec.files[1:]] == [4, 4]
    assert paths[spec.files[0].digest] == path


def test_listed_files_replace_the_detected_ones(tmp_path: Path) -> None:
    _onnx_with_external_data(tmp_path, "net.onnx.data")
    (tmp_path / "other.bin").write_bytes(b"x")
    spec, _ = prepare("net", Model("net.onnx", files=["other.bin"]), tmp_path)
    assert [file.name for file in spec.files] == ["net.onnx", "other.bin"]


@pytest.mark.parametrize("location", ["../net.onnx.data", "/weights.bin", "a/b"])
def test_external_data_elsewhere_is_refused(tmp_path: Path, location: str) -> None:
    _onnx_with_external_data(tmp_path, location)
    with pytest.raises(InvalidSpec, match=re.escape(repr(location))):
        prepare("net", Model("net.onnx"), tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"^net: .*/net\.onnx$"):
        prepare("net", Model("net.onnx"), tmp_path)
    _onnx_with_external_data(tmp_path, "weights")
    with pytest.raises(InvalidSpec, match=r"/no\.npz, .*samples"):
        prepare("net", Model("net.onnx", samples="no.npz"), tmp_path)
    os.remove(tmp_path / "weights")
    with pytest.raises(InvalidSpec, match=r"/weights, .* net\.onnx"):
        prepare("net", Model("net.onnx"), tmp_path)


def test_paths_start_beside_the_file_that_defines_the_function() -> None:
    assert folder_of(test_paths_start_beside_the_file_that_defines_the_function) == Path(__file__).resolve().parent


# Declarations


def _with_models(models: Any) -> Any:
    def work(x: int, net: Any) -> int:
        return x

    return gpu_function(models=models)(work)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (
            {"nett": Model("n.onnx")},
            "_with_models.<locals>.work: models: the function has no parameter nett to",
        ),
        ({"net": "n.onnx"}, """models: write {"net": Model("net.onnx")}, not 'net': 'n.onnx'"""),
        ([Model("n.onnx")], 'models is a dict of parameters and Models, such as {"net": Model("net.onnx")}, not ['),
    ],
)
def test_models_without_a_parameter_are_refused(models: Any, message: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        _with_models(models)
    assert caught.value.message.startswith(message)


def test_a_class_cannot_receive_a_model_as_a_method() -> None:
    with pytest.raises(InvalidSpec, match="models: run is a @method"):

        @gpu_function(models={"run": Model("n.onnx")})
        class Runs:
            @method
            def run(self) -> None: ...


def test_callers_do_not_pass_models() -> None:
    spec = _with_models({"net": Model("n.onnx")}).spec()
    assert list(spec.methods[0].parameters["properties"]) == ["x"]
    with run_locally(work=lambda x: x + 1) as platform:
        assert _with_models({"net": Model("n.onnx")}).remote(1) == 2
    assert platform.calls[0].kwargs == {"x": 1}  # by name: the model may be any parameter


# Local calls


def _squares(path: Path) -> Path:
    """Write a model with y = x · x and z = -x, for rows of two numbers."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    value, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    graph = onnx.helper.make_graph(
        [node("Mul", ["x", "x"], ["y"])], "squares", [value("x", 1, ["n", 2])], [value("y", 1, ["n", 2])]
    )
    if path.stem == "two":
        graph.node.append(node("Neg", ["x"], ["z"]))
        graph.output.append(value("z", 1, ["n", 2]))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def test_a_local_call_runs_the_model_in_this_process(tmp_path: Path) -> None:
    import numpy as np

    one, two = Model(_squares(tmp_path / "one.onnx")), Model(_squares(tmp_path / "two.onnx"))

    @gpu_function(models={"one": one, "two": two})
    def both(one: Any, numbers: list[float], two: Any, scale: float = 1.0) -> list[float]:
        rows = np.array([numbers], np.float32)
        outputs = two(x=rows)
        return [float(one(rows)[0, 1]), float(outputs["y"][0, 1]), scale * float(outputs["z"][0, 1])]

    assert both([1.0, 3.0], 2.0) == [9.0, 9.0, -6.0]
    assert both([1.0, 3.0], scale=2.0, one=lambda rows: rows) == [3.0, 9.0, -6.0]
    with run_locally():
        assert both.remote([1.0, 3.0], 2.0) == [9.0, 9.0, -6.0]


def test_a_class_has_its_models_before_it_is_entered(tmp_path: Path) -> None:
    import numpy as np

    @gpu_function(models={"net": Model(_squares(tmp_path / "one.onnx"))})
    class Squares:
        net: Any

        def __init__(self, power: int = 2) -> None:
            self.rows = self.net(np.full((1, 2), power, np.float32))

        @enter
        def warm(self) -> None:
            self.rows = self.net(self.rows)

        @method
        def run(self) -> list[list[float]]:
            return self.rows.tolist()  # type: ignore[no-any-return]

    assert Squares().run() == [[16.0, 16.0]]
    assert Squares(power=1).run() == [[1.0, 1.0]]
    with run_locally():
        assert Squares.run.remote() == [[16.0, 16.0]]


def test_a_session_has_the_interface_of_a_worker_session(tmp_path: Path) -> None:
    import asyncio

    from gpufn.call.local_session import LocalSession

    session = LocalSession(_squares(tmp_path / "two.onnx"))
    assert session.inputs == (TensorSpec("x", "FP32", (-1, 2)),)
    assert [output.name for output in session.outputs] == ["y", "z"]
    assert session([[1, 3]]).z.tolist() == [[-1.0, -3.0]]  # converted
    assert asyncio.run(session.aio([[1, 3]]))["y"].tolist() == [[1.0, 9.0]]
    with pytest.raises(AttributeError, match=r"'q'.* y, z"):
        session([[1, 3]]).q  # noqa: B018


def test_a_session_multiplies_integers_exactly_on_every_processor(tmp_path: Path) -> None:
    from gpufn.call.local_session import LocalSession

    session = LocalSession(_squares(tmp_path / "one.onnx"))
    assert session._session.get_session_options().get_session_config_entry("session.x64quantprecision") == "1"


def test_a_session_names_wrong_inputs(tmp_path: Path) -> None:
    from gpufn.call.local_session import LocalSession

    session = LocalSession(_squares(tmp_path / "one.onnx"))
    for arrays, named, message in [
        ((), {}, "x: missing; the model takes x"),
        ((1,), {"q": 2}, "q: the model has no such input; it takes x"),
        ((1,), {"x": 2}, "x: given twice; it takes x"),
        ((1, 2), {}, "got 2 arrays; the model takes x"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            session(*arrays, **named)
