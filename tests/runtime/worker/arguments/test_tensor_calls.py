"""Calls of the Open Inference Protocol to functions whose parameters are arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from gpufn.declare.hints.signature_schema import methods_of
from gpufn_core.encoding import media, values
from gpufn_core.errors import InvalidInput, ResultNotEncodable
from gpufn_core.spec.function_spec import Batch
from gpufn_core.spec.tensor_signature import takes_tensors, tensor_inputs
from gpufn_runtime.worker.arguments.parameters import Parameters
from gpufn_runtime.worker.arguments.tensor_calls import TensorFunction

X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}


def scale(x: npt.NDArray[np.float32], factor: float = 2.0) -> Any:
    return x * np.float32(factor)


def function(raw: Callable[..., Any]) -> TensorFunction:
    (method,) = methods_of(raw, None)
    return TensorFunction(raw, method.kind, Parameters(raw), tensor_inputs(method), name="f", version="1")


def response(raw: Callable[..., Any], binary: bytes = b"", **request: Any) -> dict[str, Any]:
    """Call a function with a request; return the JSON of the response."""
    head = msgspec.json.encode({"inputs": [X]} | request)
    tensors = function(raw)
    args, kwargs = tensors.bind(media.tensors(len(head)), head + binary)
    result = tensors.call(*args, **kwargs)
    encoded = asyncio.run(result) if asyncio.iscoroutine(result) else result
    assert isinstance(encoded, values.Encoded)
    answer: dict[str, Any] = msgspec.json.decode(b"".join(encoded.parts))
    return answer


def outputs(answer: dict[str, Any]) -> dict[str, Any]:
    return {output["name"]: output["data"] for output in answer["outputs"]}


def test_inputs_are_arguments_and_the_result_is_an_output() -> None:
    assert response(scale, id="r") == {
        "model_name": "f", "model_version": "1", "id": "r",
        "outputs": [{"name": "output", "datatype": "FP32", "shape": [2], "data": [2.0, 4.0]}],
    }  # fmt: skip


def test_parameters_of_the_request_are_the_other_arguments() -> None:
    assert outputs(response(scale, parameters={"factor": 3, "priority": 1})) == {"output": [3.0, 6.0]}
    with pytest.raises(InvalidInput, match="factor"):
        response(scale, parameters={"factor": "much"})


def test_an_argument_may_be_written_to() -> None:
    def clear(x: npt.NDArray[np.float32]) -> Any:
        x[:] = 0
        return x

    sent = np.ones(2, np.float32).tobytes()
    tensor = X | {"data": None, "parameters": {"binary_data_size": len(sent)}}
    assert outputs(response(clear, sent, inputs=[tensor])) == {"output": [0.0, 0.0]}


def test_several_arrays_are_named_or_numbered_outputs() -> None:
    def named(x: npt.NDArray[np.float32]) -> Any:
        return {"sum": x.sum(), "text": np.array(["a", "b"])}

    async def numbered(x: npt.NDArray[np.float32]) -> Any:
        return x, 7

    assert outputs(response(named)) == {"sum": [3.0], "text": ["a", "b"]}
    assert outputs(response(numbered)) == {"output_0": [1.0, 2.0], "output_1": [7]}
    assert outputs(response(numbered, outputs=[{"name": "output_1"}])) == {"output_1": [7]}


@pytest.mark.parametrize(
    "tensor",
    [
        X | {"name": "y"},
        X | {"datatype": "INT64"},
        X | {"datatype": "COMPLEX"},
        X | {"shape": [3]},
        X | {"data": None, "parameters": {"binary_data_size": 8}},
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(tensor: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        response(scale, inputs=[tensor])


def test_a_missing_tensor_is_refused() -> None:
    with pytest.raises(InvalidInput, match="x"):
        response(scale, inputs=[])


def test_a_result_that_is_no_tensor_fails_the_call() -> None:
    def objects(x: npt.NDArray[np.float32]) -> Any:
        return {"a": object()}

    with pytest.raises(ResultNotEncodable, match="a: object"):
        response(objects)
    with pytest.raises(ResultNotEncodable, match="none"):
        response(scale, outputs=[{"name": "none"}])


def test_other_bodies_are_read_as_before() -> None:
    tensors = function(scale)
    args, kwargs = tensors.bind(media.JSON, b'{"x": [1, 2]}')
    np.testing.assert_array_equal(tensors.call(*args, **kwargs), np.array([2, 4], np.float32))


def test_arrays_in_the_signature_are_the_inputs() -> None:
    def f(a: npt.NDArray[np.int64], b: np.ndarray | None = None, top: int = 1) -> None: ...
    def items(a: npt.NDArray[np.int64]) -> Any:
        yield a

    (method,), (streaming,) = methods_of(f, None), methods_of(items, None)
    assert tensor_inputs(method) == {"a": "INT64", "b": ""}
    assert takes_tensors(method)
    assert not takes_tensors(streaming)


# --- batches ---------------------------------------------------------------------------------------------------------


def scale_all(x: list[npt.NDArray[np.float32]], factor: list[float] = [2.0]) -> list[Any]:  # noqa: B006
    return [array * np.float32(each) for array, each in zip(x, factor, strict=True)]


async def scale_all_async(x: list[npt.NDArray[np.float32]], factor: list[float] = [2.0]) -> list[Any]:  # noqa: B006
    return scale_all(x, factor)


def batched(raw: Callable[..., Any]) -> TensorFunction:
    (method,) = methods_of(raw, Batch(8))
    assert takes_tensors(method)
    parameters = Parameters(raw, batched=True)
    return TensorFunction(raw, method.kind, parameters, tensor_inputs(method), name="f", version="1", batched=True)


def run_batch(raw: Callable[..., Any], *bodies: tuple[str, bytes]) -> list[Any]:
    """Run calls as one batch; return the JSON of responses, and other results as they are."""
    tensors = batched(raw)
    result = tensors.call(calls=[tensors.by_name(*body)["calls"] for body in bodies])
    results = asyncio.run(result) if asyncio.iscoroutine(result) else result
    return [msgspec.json.decode(b"".join(each.parts)) if isinstance(each, values.Encoded) else each for each in results]


def body(**request: Any) -> tuple[str, bytes]:
    return media.TENSORS, msgspec.json.encode({"inputs": [X]} | request)


@pytest.mark.parametrize("raw", [scale_all, scale_all_async])
def test_calls_of_the_protocol_and_others_share_a_batch(raw: Callable[..., Any]) -> None:
    first, other, last = run_batch(
        raw, body(id="1"), (media.JSON, b'{"x": [1, 2], "factor": 4}'), body(parameters={"factor": 3})
    )
    assert (first["id"], outputs(first)) == ("1", {"output": [2.0, 4.0]})
    np.testing.assert_array_equal(other, np.array([4, 8], np.float32))
    assert outputs(last) == {"output": [3.0, 6.0]}


def test_a_call_of_a_batch_that_fails_does_not_fail_the_others() -> None:
    def partly(x: list[npt.NDArray[np.float32]]) -> list[Any]:
        return [x[0], ValueError("no"), object(), x[0]]

    answers = run_batch(partly, body(), body(), body(), body(outputs=[{"name": "none"}]))
    assert outputs(answers[0]) == {"output": [1.0, 2.0]}
    assert [type(each) for each in answers[1:]] == [ValueError, ResultNotEncodable, ResultNotEncodable]
    with pytest.raises(InvalidInput, match="x"):
        batched(partly).by_name(*body(inputs=[]))


@pytest.mark.parametrize("result", [{"a": 1}, "a", {1}, [1, 2], None])
def test_a_result_that_is_no_list_of_the_calls_is_left_to_the_batch(result: Any) -> None:
    def wrong(x: list[npt.NDArray[np.float32]]) -> Any:
        return result

    tensors = batched(wrong)
    assert tensors.call(calls=[tensors.by_name(*body())["calls"]]) is result
