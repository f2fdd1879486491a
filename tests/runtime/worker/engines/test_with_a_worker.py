"""Models in a real worker process: passed to functions and classes, and deployed without code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gpufn_core.encoding import media, values
from gpufn_core.spec.function_spec import Batch
from gpufn_core.spec.model_spec import TensorSpec
from tests.runtime.worker.engines.engines import rows, tensor, write_engine, write_negation

Start = Any


@pytest.fixture
def engine(tmp_path: Path) -> str:
    return str(write_negation(tmp_path / "engine"))


def test_a_function_receives_its_session_with_each_call(start: Start, engine: str) -> None:
    worker = start(
        """
        def f(net, x: float, *, twice: bool = False):
            return net([[x, x]])[0].tolist() * (2 if twice else 1)
        """,
        models=("net",), engines={"net": (engine,)},
    )  # fmt: skip
    assert worker.call(b'{"x": 3}') == b"[-3.0,-3.0]"
    by_position = values.encode_call((4.0,), {"twice": True})
    assert worker.call(by_position, content_type=media.NATIVE) == b"[-4.0,-4.0,-4.0,-4.0]"
    kind, error = worker.failure(b'{"x": 3, "net": 1}')
    assert (kind, error.field) == ("rejected", "net"), "it is no parameter of a call"


def test_a_mismatch_with_the_model_is_the_exception_of_the_function(start: Start, engine: str) -> None:
    worker = start("def f(net): return net([1.0])", models=("net",), engines={"net": (engine,)})
    kind, error = worker.failure()
    assert (kind, error.error_type) == ("raised", "InvalidInput")
    assert "x FP32[-1,2]" in error.message
    assert error.message.endswith("[1]")


def test_a_class_has_its_session_before_enter(start: Start, engine: str) -> None:
    worker = start(
        """
        from gpufn import enter, method
        class F:
            def __init__(self): self.at_once = self.net.manifest.max_batch
            @enter
            def load(self): self.warm = self.net([[1, 1]]).tolist()
            @method
            def call(self): return [self.at_once, self.warm]
        """,
        "F", methods={"call": "sync"}, models=("net",), engines={"net": (engine,)},
    )  # fmt: skip
    assert worker.call(method="call") == b"[8,[[-1.0,-1.0]]]"


def test_async_functions_and_several_models(start: Start, engine: str, tmp_path: Path) -> None:
    x = rows(-2)
    other = write_engine(tmp_path / "abs", {"x": x}, {"y": abs(x)}, nodes=["Abs"])
    worker = start(
        """
        async def f(negate, size, x: float):
            return (await negate.aio(await size.aio([[x, x]])))[0, 0]
        """,
        kind="async", concurrency=4, models=("negate", "size"), engines={"negate": (engine,), "size": (str(other),)},
    )  # fmt: skip
    numbers = [worker.run(b'{"x": %d}' % value) for value in (-1, -2, 3)]
    answers = {result.attempt: body for result, body in (worker.result() for _ in numbers)}
    assert [answers[number] for number in numbers] == [b"-1.0", b"-2.0", b"-3.0"]


def test_a_function_with_batch_receives_its_session_beside_the_lists(start: Start, engine: str) -> None:
    worker = start(
        "def f(x: list[float], net): return net([[one, one] for one in x])[:, 0].tolist()",
        batch=Batch(max_size=4), models=("net",), engines={"net": (engine,)},
    )  # fmt: skip
    assert worker.call(b'{"x": 5}') == b"-5.0"


def test_calls_with_tensors_share_a_batch_of_a_function_with_code(start: Start) -> None:
    worker = start(
        """
        import numpy as np
        from numpy.typing import NDArray
        def f(x: list[NDArray[np.float32]], factor: list[int] = [2]):
            return [array * n for array, n in zip(x, factor)]
        """,
        batch=Batch(max_size=4), tensors={"x": "FP32"},
    )  # fmt: skip
    parameters: list[dict[str, int]] = [{}, {}, {"factor": 3}, {}, {"factor": 4}]
    numbers = []
    for given in parameters:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
        request = msgspec.json.encode({"inputs": [tensor], "parameters": given})
        numbers.append(worker.run(request, content_type=media.TENSORS, accept=media.TENSORS))
    answers = {result.attempt: json.loads(body) for result, body in (worker.result() for _ in numbers)}
    found = [answers[number]["outputs"][0]["data"][0] for number in numbers]
    assert found == [2, 2, 3, 2, 4]


def test_a_start_without_a_working_engine_names_each_reason(make_peer: Start, tmp_path: Path) -> None:
    bad = write_negation(tmp_path / "bad")
    (bad / "model.onnx").write_bytes(b"")
    worker = make_peer("def f(net): pass", models=("net",), engines={"net": (str(bad),)}).launch()
    failure = worker.start_failure()
    assert failure.phase == "load"
    assert failure.error.message.startswith("net: ")
    assert "bad: model.onnx" in failure.error.message
    assert worker.logs[0][:2] == (0, "stderr")
    assert "bad: model.onnx" in worker.logs[0][2]


def test_a_worker_without_models_imports_none_of_it(start: Start) -> None:
    worker = start(
        """
        import sys
        def f(): return [name for name in sys.modules if name in ("numpy", "onnxruntime") or "engines" in name]
        """
    )
    assert worker.call() == b"[]"


# --- functions without code ------------------------------------------------------------------------------------------


@pytest.fixture
def model(start: Start, engine: str) -> Any:
    return start(models=("net",), engines={"net": (engine,)}, batch=Batch(max_size=8))


def _oip(array: Any, datatype: str = "FP32", name: str = "x", **rest: Any) -> tuple[str, bytes]:
    described = {"name": name, "datatype": datatype, "shape": array.shape}
    head = json.dumps({"inputs": [{**described, "parameters": {"binary_data_size": array.nbytes}}], **rest}).encode()
    return f"{media.TENSORS};header-bytes={len(head)}", head + array.tobytes()


def test_json_msgpack_and_the_sdks_encoding_become_a_map_of_arrays(model: Any) -> None:
    assert model.call(b'{"x": [[1, 2]]}') == b'{"y":[[-1.0,-2.0]]}'
    packed = msgspec.msgpack.encode({"x": [[1, 2]]})
    assert model.call(packed, content_type=media.MSGPACK) == b'{"y":[[-1.0,-2.0]]}'
    native = values.encode_call((), {"x": np.array([[1, 2]])})
    body = model.call(native, content_type=media.NATIVE, accept=media.NATIVE)
    answer = values.decode_value(media.NATIVE, body)["y"]
    assert (answer.dtype, answer.tolist()) == (np.float32, [[-1, -2]])


def test_a_protocol_request_is_answered_in_the_protocols_form(model: Any) -> None:
    kind, body = _oip(rows(1, 2), id="abc", parameters={"binary_data_output": True})
    model.run(body, content_type=kind, accept=media.TENSORS)
    result, answer = model.result()
    assert media.media_type(result.content_type) == media.TENSORS
    size = int(result.content_type.partition("header-bytes=")[2])
    assert json.loads(answer[:size]) == {
        "model_name": "f", "model_version": "1", "id": "abc",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}}],
    }  # fmt: skip
    assert np.frombuffer(answer[size:], np.float32).tolist() == [-1, -1, -2, -2]


def test_without_batch_it_answers_as_well(start: Start, engine: str) -> None:
    worker = start(models=("net",), engines={"net": (engine,)})
    assert worker.call(b'{"x": [[1, 2]]}') == b'{"y":[[-1.0,-2.0]]}'
    assert worker.failure(b'{"x": [1]}')[0] == "rejected"


@pytest.mark.parametrize(
    ("content_type", "body", "code", "message"),
    [
        (media.JSON, b'{"x": [[1, 2, 3]]}', "invalid_input", "x: the model takes x FP32[-1,2], not [1, 3]"),
        (media.JSON, b'{"z": 1}', "invalid_input", "z: the model has no such input; it takes x FP32[-1,2]"),
        (media.JSON, b"[1]", "invalid_input", "the body must be a map from the model's inputs to arrays"),
        (media.JSON, b"{", "invalid_input", "the body is not valid application/json: Input data was truncated"),
        (media.JSON, b"[" * 100_000, "invalid_input", "cannot read the input: RecursionError: "),
        (media.TENSORS, b"{}", "invalid_input", "this is not an inference request: "),
        ("image/png", b"png", "unsupported_media_type", "'image/png' is not accepted: send application/json, "),
    ],
)
def test_a_bad_body_is_rejected(model: Any, content_type: str, body: bytes, code: str, message: str) -> None:
    kind, error = model.failure(body, content_type=content_type)
    assert (kind, error.code) == ("rejected", code)
    assert error.message.startswith(message)


def test_values_that_the_model_refuses_are_the_callers_fault_and_named(start: Start, tmp_path: Path) -> None:
    engine = write_engine(
        tmp_path / "pick", {"x": np.array([1.5, 2.5], np.float32), "at": np.array(0)}, {"y": np.array(1.5, np.float32)},
        nodes=[("Gather", ["x", "at"], ["y"])],
        inputs=[tensor("x", "FP32", -1), TensorSpec("at", "INT64", ())], outputs=[TensorSpec("y", "FP32", ())],
        batched=False,
    )  # fmt: skip
    worker = start(models=("net",), engines={"net": (str(engine),)})
    assert worker.call(b'{"x": [1.5, 2.5], "at": 1}') == b'{"y":2.5}'
    kind, error = worker.failure(b'{"x": [1.5, 2.5], "at": 9}')
    assert (kind, error.code) == ("rejected", "invalid_input")
    assert "x float32[2] = [1.5, 2.5], at int64[] = 9: " in error.message
    code = start("def f(net): return net([1.5], 9)", models=("net",), engines={"net": (str(engine),)})
    kind, error = code.failure(b"{}")
    assert (kind, error.error_type) == ("raised", "InvalidInput"), "the function chose the value"


def test_shapes_that_an_operator_refuses_are_the_callers_fault_and_named(start: Start, tmp_path: Path) -> None:
    """ONNX Runtime has another exception for them than for values: Fail."""
    x = np.arange(6, dtype=np.float32)
    engine = write_engine(
        tmp_path / "fold", {"x": x, "shape": np.array([2, 3])}, {"y": x.reshape(2, 3)},
        nodes=[("Reshape", ["x", "shape"], ["y"])],
        inputs=[tensor("x", "FP32", -1), TensorSpec("shape", "INT64", (2,))], outputs=[tensor("y", "FP32", -1, -1)],
        batched=False,
    )  # fmt: skip
    worker = start(models=("net",), engines={"net": (str(engine),)})
    assert worker.call(b'{"x": [1, 2], "shape": [1, 2]}') == b'{"y":[[1.0,2.0]]}'
    kind, error = worker.failure(b'{"x": [1, 2], "shape": [2, 5]}')
    assert (kind, error.code) == ("rejected", "invalid_input")
    assert "x float32[2] = [1.0, 2.0], shape int64[2] = [2, 5]: " in error.message


def test_memory_that_is_not_there_is_not_the_callers_fault(start: Start, tmp_path: Path) -> None:
    engine = write_engine(
        tmp_path / "zeros", {"shape": np.array([1, 1])}, {"y": np.zeros((1, 1), np.float32)},
        nodes=[("ConstantOfShape", ["shape"], ["y"])],
        inputs=[TensorSpec("shape", "INT64", (2,))], outputs=[tensor("y", "FP32", -1, -1)], batched=False,
    )  # fmt: skip
    worker = start(models=("net",), engines={"net": (str(engine),)})
    kind, error = worker.failure(b'{"shape": [1099511627776, 1024]}')
    assert (kind, error.code) == ("raised", "function_raised")


def test_an_input_with_a_default_may_be_left_out(start: Start, tmp_path: Path) -> None:
    x = np.array([1, 2], np.float32)
    half = np.array(0.5, np.float32)
    engine = write_engine(
        tmp_path / "add", {"x": x, "by": half}, {"y": x + half}, nodes=[("Add", ["x", "by"], ["y"])],
        inputs=[tensor("x", "FP32", -1), TensorSpec("by", "FP32", (), half.tobytes())],
        outputs=[tensor("y", "FP32", -1)], batched=False,
    )  # fmt: skip
    worker = start(models=("net",), engines={"net": (str(engine),)})
    assert worker.call(b'{"x": [1, 2]}') == b'{"y":[1.5,2.5]}'
    assert worker.call(b'{"x": [1, 2], "by": 3}') == b'{"y":[4.0,5.0]}'
    assert worker.failure(b'{"by": 3}')[1].field == "x"


def test_numbers_that_json_lacks_are_texts_both_ways(model: Any) -> None:
    answer = model.call(b'{"x": [["NaN", 1], ["Infinity", "-Infinity"]]}')
    assert answer == b'{"y":[["NaN",-1.0],["-Infinity","Infinity"]]}'
    request = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": ["Infinity", "NaN"]}
    body = model.call(json.dumps({"inputs": [request]}).encode(), content_type=media.TENSORS, accept=media.TENSORS)
    assert json.loads(body)["outputs"][0]["data"] == ["-Infinity", "NaN"]
    kind, error = model.failure(b'{"x": [["nan", 1]]}')
    assert (kind, error.field) == ("rejected", "x")
    refused = model.failure(b'{"x": [[1, NaN]]}')[1].message
    assert "NaN (byte 11)" in refused


def test_calls_that_gather_share_runs_and_a_bad_one_fails_alone(start: Start, tmp_path: Path) -> None:
    """The output has the number of rows of its run."""
    x = rows(1, 2)
    nodes = [
        ("Mul", ["x", "x"], ["square"]),
        ("ReduceSum", ["square"], ["sum"]),
        ("Mul", ["x", "sum"], ["y"]),
    ]
    engine = write_engine(tmp_path / "sum", {"x": x}, {"y": x * np.sum(x * x)}, nodes=nodes, max_batch=4)
    worker = start(models=("net",), engines={"net": (str(engine),)}, batch=Batch(max_size=8))
    many = json.dumps(
        {"x": [[1, 1]] * 20_000}, separators=(",", ":")
    ).encode()  # in 5000 runs: the rest arrives meanwhile
    bodies = [many, *[b'{"x": [[1, 0]]}'] * 5, b'{"x": [[1, 0, 0]]}', b'{"x": [[1, 0], [1, 0]]}']
    busy, *good, bad, wide = worker.run_at_once(*bodies)
    answers = {result.attempt: (result.kind.value, body) for result, body in (worker.result() for _ in range(8))}
    assert answers.pop(busy)[0] == "succeeded"
    assert answers.pop(bad)[0] == "rejected"
    assert sorted(answers) == sorted([*good, wide])
    sums = [json.loads(answers[number][1])["y"][0][0] for number in good]
    assert sums == [4.0, 4.0, 4.0, 4.0, 3.0]
    assert json.loads(answers[wide][1])["y"] == [[3.0, 0.0], [3.0, 0.0]]


def test_calls_that_cannot_share_runs_do_not_wait_for_each_other(start: Start, tmp_path: Path) -> None:
    """No call of a batch is answered before all have run, and all run again if one fails."""
    engine = write_engine(
        tmp_path / "gather", {"x": np.array([0])}, {"y": np.array([1])},
        nodes=[("Shape", ["x"], ["table"]), ("Gather", ["table", "x"], ["y"])],  # there is only an element 0
        inputs=[tensor("x", "INT64", -1)], outputs=[tensor("y", "INT64", -1)], batched=False,
    )  # fmt: skip
    worker = start(models=("net",), engines={"net": (str(engine),)}, batch=Batch(max_size=8))
    busy = json.dumps({"x": [0] * 200_000}, separators=(",", ":")).encode()  # the rest arrives meanwhile
    first, *numbers = worker.run_at_once(busy, b'{"x": [0]}', b'{"x": [9]}', b'{"x": [0]}')
    answers = {result.attempt: (result.kind.value, body) for result, body in (worker.result() for _ in range(4))}
    assert answers.pop(first)[0] == "succeeded"
    assert [answers[number][0] for number in numbers] == ["succeeded", "rejected", "succeeded"]
    assert "a batch of" not in str(worker.logs)


def test_an_answer_above_the_limit_is_reported(start: Start, tmp_path: Path) -> None:
    x = np.zeros((1, 1), np.float32)
    engine = write_engine(
        tmp_path / "wide", {"x": x, "n": np.array([2])}, {"y": np.zeros((1, 2), np.float32)},
        nodes=[("Expand", ["x", "n"], ["y"])],
        inputs=[tensor("x", "FP32", 1, 1), tensor("n", "INT64", 1)], outputs=[tensor("y", "FP32", 1, -1)],
        batched=False,
    )  # fmt: skip
    worker = start(models=("net",), engines={"net": (str(engine),)})
    kind, error = worker.failure(b'{"x": [[0]], "n": [3000000]}', accept=media.NATIVE)
    assert (kind, error.code) == ("raised", "result_not_encodable")
    assert "more than the" in error.message
