"""Models on a running platform: deployed with the CLI, and called with clients of several protocols."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from onnx import ModelProto, TensorProto
from tritonclient import http as triton
from tritonclient.http import aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

import gpufn
from gpufn_core.home import Home
from gpufn_core.spec.model_spec import DATATYPES
from tests.builder import models
from tests.conftest import Platform
from tests.waiting import until

pytestmark = pytest.mark.e2e

APPS = Path(__file__).parent / "apps"
ARRAYS_APP = """
import numpy as np
from numpy.typing import NDArray
from gpufn import gpu_function

@gpu_function
def scaled(x: NDArray[np.float32], factor: int = 1) -> NDArray[np.float32]:
    return x * np.float32(factor)
"""
ROWS = np.array([[1, 0, 0, 0], [0, -1, 0.5, 0]], np.float32)
# One input and output of each datatype: y = x. Texts are a model of their own.
SAME: dict[str, npt.NDArray[Any]] = {
    "BOOL": np.array([[True, False]]),
    **{f"UINT{bits}": np.array([[1, 2**bits - 1]], f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.array([[-(2 ** (bits - 1)), 2]], f"int{bits}") for bits in (8, 16, 32, 64)},
    "FP16": np.array([[0.5, -2]], np.float16),
    "FP32": np.array([[0.1, -2]], np.float32),
    "FP64": np.array([[0.1, -2]], np.float64),
    "BF16": np.array([[0.5, -2]], ml_dtypes.bfloat16),
}
_ELEMENTS = {"FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BF16": "BFLOAT16"}


def same() -> ModelProto:
    elements = [(name, getattr(TensorProto, _ELEMENTS.get(name, name))) for name in SAME]
    return models.model(
        [models.node("Identity", name.lower(), f"{name.lower()}_out") for name in SAME],
        [models.value(name.lower(), ["N", 2], element) for name, element in elements],
        [models.value(f"{name.lower()}_out", ["N", 2], element) for name, element in elements],
    )


def scores() -> npt.NDArray[Any]:
    from onnx import numpy_helper

    weights = numpy_helper.to_array(models.weights("w", 4, 3))
    return np.asarray(ROWS @ weights)


@pytest.fixture(scope="module")
def deployed(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`scores`, rows of four numbers to scores, a label and a mask; `same`, of each datatype; `texts`, joined."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "scores.onnx").write_bytes(models.several_outputs().SerializeToString())
    (folder / "same.onnx").write_bytes(same().SerializeToString())
    platform.gpufn("deploy", folder / "scores.onnx", "--max-batch", "4", "--idle-timeout", "60")
    platform.gpufn("deploy", folder / "same.onnx", "--max-batch", "4")
    (folder / "texts.onnx").write_bytes(models.texts().SerializeToString())
    platform.gpufn("deploy", folder / "texts.onnx", "--max-batch", "4")
    return folder


@pytest.fixture
def client(platform: Platform, deployed: Path) -> Iterator[Any]:
    with triton.InferenceServerClient(_host(platform), network_timeout=60) as client:
        yield client


def _host(platform: Platform) -> str:
    return platform.url.removeprefix("http://")


def _input(name: str, array: npt.NDArray[Any], *, binary: bool = True) -> Any:
    tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array, binary_data=binary)
    return tensor


# --- the Open Inference Protocol --------------------------------------------------------------------------------------


def test_several_outputs_arrive_in_the_requested_order(client: Any) -> None:
    logits = scores()
    for binary in (True, False):
        answer = client.infer("scores", [_input("x", ROWS, binary=binary)], request_id="r-1")
        np.testing.assert_allclose(answer.as_numpy("logits"), logits, rtol=1e-5)
        assert answer.as_numpy("label").tolist() == logits.argmax(1).tolist()
        assert answer.as_numpy("above").tolist() == (logits > 0).tolist()
        assert answer.get_response()["id"] == "r-1"
    wanted = [triton.InferRequestedOutput("label", binary_data=False)]
    response = client.infer("scores", [_input("x", ROWS)], outputs=wanted).get_response()
    assert response["outputs"] == [
        {"name": "label", "datatype": "INT64", "shape": [2], "data": logits.argmax(1).tolist()}
    ]


def test_every_datatype_passes_in_binary_and_in_json(client: Any, platform: Platform) -> None:
    assert {*SAME, "BYTES"} == set(DATATYPES)
    answer = client.infer("same", [_input(name.lower(), array) for name, array in SAME.items()])
    for name, array in SAME.items():
        found = answer.as_numpy(f"{name.lower()}_out")
        assert (found.dtype, found.tolist()) == (array.dtype, array.tolist())
    tensors = [
        {"name": name.lower(), "datatype": name, "shape": array.shape, "data": array.tolist()}
        for name, array in SAME.items()
    ]
    outputs = platform.client.post("/v2/models/same/infer", json={"inputs": tensors}).json()["outputs"]
    assert {each["datatype"]: each["data"] for each in outputs} == {
        name: array.reshape(-1).tolist() for name, array in SAME.items()
    }


def test_texts_go_through_in_binary_and_in_json(client: Any) -> None:
    left, right = np.array(["gr", "", "日"], np.object_), np.array(["ün", "", "本"], np.object_)
    for binary in (True, False):
        answer = client.infer("texts", [_input("left", left, binary=binary), _input("right", right, binary=binary)])
        assert [text.decode() for text in answer.as_numpy("joined")] == ["grün", "", "日本"]


def test_calls_at_the_same_time_get_their_own_rows(deployed: Path, platform: Platform) -> None:
    async def call_all() -> list[Any]:
        async with triton_aio.InferenceServerClient(_host(platform)) as client:
            rows = [ROWS * number for number in range(1, 17)]
            return list(await asyncio.gather(*(client.infer("scores", [_input("x", row)]) for row in rows)))

    for number, answer in enumerate(asyncio.run(call_all()), 1):
        np.testing.assert_allclose(answer.as_numpy("logits"), scores() * number, rtol=1e-4)


def test_a_request_that_does_not_fit_the_model_gets_a_client_error_of_the_protocol(client: Any) -> None:
    for tensor, message in (
        (_input("x", ROWS.astype(np.float64)), "x: the model takes FP32, not FP64"),
        (_input("y", ROWS), "y: the model has no such input; it takes x"),
        (_input("x", ROWS[:, :3]), "x: the model takes x FP32[-1,4], not [2, 3]"),
        (_input("x", ROWS[0]), "x: the model takes x FP32[-1,4], not [4]"),
        (_input("x", ROWS[:0]), "x: there are no rows"),
    ):
        with pytest.raises(InferenceServerException) as caught:
            client.infer("scores", [tensor])
        assert (caught.value.status(), caught.value.message()) == ("422", message)
    with pytest.raises(InferenceServerException, match="There is no model 'nothing'"):
        client.infer("nothing", [_input("x", ROWS)])


def test_a_shape_outside_the_profile_is_refused_with_the_profile(
    deployed: Path, platform: Platform, client: Any, tmp_path: Path
) -> None:
    net = models.model([models.node("Neg", "x", "y")], [models.value("x", ["N", None])], [models.value("y", None)])
    (tmp_path / "long.onnx").write_bytes(net.SerializeToString())
    platform.gpufn("deploy", tmp_path / "long.onnx", "--shape", "x=1x2:1x4:2x8")
    said = "x: the engine accepts [1, 2] to [2, 8], tuned for [1, 4], not [1, 9]"
    with pytest.raises(InferenceServerException) as caught:
        client.infer("long", [_input("x", np.zeros((1, 9), np.float32))])
    assert (caught.value.status(), caught.value.message()) == ("422", said)
    refused = platform.post("long", {"x": [[0.0] * 9]})
    problem = refused.json()
    assert (refused.status_code, problem["code"], problem["field"], problem["detail"]) == (
        422, "invalid_input", "x", said,
    )  # fmt: skip
    assert platform.invoke("long", {"x": [[1.0] * 8] * 2}) == {"y": [[-1.0] * 8] * 2}


# --- other ways to call -----------------------------------------------------------------------------------------------


def test_a_model_is_called_as_any_function_is(deployed: Path, platform: Platform) -> None:
    answer = platform.invoke("scores", {"x": ROWS.tolist()})
    np.testing.assert_allclose(answer["logits"], scores(), rtol=1e-5)
    with gpufn.Client(platform.url) as sdk:
        found = sdk.invoke("scores", x=ROWS)
    assert (found["logits"].dtype, found["label"].tolist()) == (np.float32, scores().argmax(1).tolist())
    np.testing.assert_allclose(found["logits"], scores(), rtol=1e-5)


def test_a_function_receives_its_model(deployed: Path, platform: Platform, tmp_path: Path) -> None:
    shutil.copy(APPS / "scored.py", tmp_path)
    shutil.copy(deployed / "scores.onnx", tmp_path)
    platform.gpufn("deploy", tmp_path / "scored.py")
    answer = platform.invoke("scored", {"rows": ROWS.tolist()})
    np.testing.assert_allclose(answer["logits"], scores(), rtol=1e-5)
    assert answer["label"] == scores().argmax(1).tolist()
    refused = platform.post("scored", {"rows": [[1.0]]})
    assert (refused.status_code, refused.json()["error_type"]) == (500, "InvalidInput")
    described = platform.gpufn("models", "describe", "scored.net")
    assert "logits" in described


# --- large tensors ----------------------------------------------------------------------------------------------------


def test_a_function_with_arrays_is_called_as_a_model_is(client: Any, platform: Platform, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(ARRAYS_APP)
    platform.gpufn("deploy", file)
    sent = triton.InferInput("x", [2, 2], "FP32")
    sent.set_data_from_numpy(np.full((2, 2), 1.5, np.float32))
    answer = client.infer("scaled", [sent], parameters={"factor": 2})
    np.testing.assert_array_equal(answer.as_numpy("output"), np.full((2, 2), 3, np.float32))
    assert client.get_model_metadata("scaled")["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
    assert "scaled" in [model["name"] for model in client.get_model_repository_index()]


def test_large_tensors_go_both_ways_and_leave_nothing_in_memory(
    platform: Platform, client: Any, tmp_path: Path
) -> None:
    size = 10 << 20
    net = models.model([models.node("Neg", "x", "y")], [models.value("x", ["N", size // 4])], [models.value("y", None)])
    (tmp_path / "large.onnx").write_bytes(net.SerializeToString())
    platform.gpufn("deploy", tmp_path / "large.onnx")
    sent = np.arange(size // 4, dtype=np.float32)[None]
    wanted = [triton.InferRequestedOutput("y", binary_data=True)]
    shared_bodies = Home(platform.home).shared_bodies
    others = {path for path in shared_bodies.rglob("*") if path.is_file()}  # other tests stored values there
    for _ in range(10):
        answer = client.infer("large", [_input("x", sent)], outputs=wanted)
        np.testing.assert_array_equal(answer.as_numpy("y"), -sent)
    until(
        lambda: (
            not sum(path.stat().st_size for path in shared_bodies.rglob("*") if path.is_file() and path not in others)
        ),
        "without a shared body",
    )
    until(lambda: _mapped_bytes(shared_bodies) <= 2 * size, "no more mapped than the bodies of the last call")


def _mapped_bytes(shared_bodies: Path) -> int:
    """Return the size of the shared bodies that processes still map after their files were removed."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text().splitlines():
                addresses, _, _, _, inode, *path = line.split(maxsplit=5)
                if path and path[0].startswith(str(shared_bodies)):
                    first, last = (int(address, 16) for address in addresses.split("-"))
                    found.add((inode, last - first))
    return sum(size for _, size in found)


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_killed_worker_costs_its_calls_at_most(deployed: Path, platform: Platform) -> None:
    answered: list[int] = []
    wrong: list[str] = []
    is_over = threading.Event()

    def call() -> None:
        while not is_over.is_set():
            answer = platform.post("scores", {"x": ROWS.tolist()})
            if answer.status_code == 200:
                answered.append(1)
            elif answer.json()["code"] != "worker_lost":
                wrong.append(answer.text)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        until(lambda: len(answered) > 5, "served")
        killed = _workers(platform, "scores")
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        goal = len(answered) + 20
        until(lambda: len(answered) > goal, "served again")
    finally:
        is_over.set()
        for caller in callers:
            caller.join()
    assert wrong == []
    until(lambda: set(killed).isdisjoint(_workers(platform, "scores")), "replaced")


@pytest.mark.parametrize(
    ("name", "options", "remark"),
    [("seeded", (), "random numbers with a seed"), ("unverified", ("--no-verify",), "not verified")],
)
def test_a_model_that_draws_random_numbers_is_served(
    platform: Platform, tmp_path: Path, name: str, options: tuple[str, ...], remark: str
) -> None:
    (tmp_path / f"{name}.onnx").write_bytes(models.noisy().SerializeToString())
    platform.gpufn("deploy", tmp_path / f"{name}.onnx", *options)
    first, second = (platform.invoke(name, {"x": [0.0] * 8})["y"] for _ in range(2))
    assert first != second
    [engine] = platform.client.get(f"/v1/models/{name}").json()["engines"]["cpu"]
    assert any(remark in each for each in engine["remarks"])
    assert (engine["accuracy"] is None) == ("--no-verify" in options)


@pytest.mark.parametrize("is_seen", [True, False], ids=["changed", "rotten"])
def test_a_damaged_engine_is_fetched_again(platform: Platform, tmp_path: Path, is_seen: bool) -> None:
    """Rotten: the bytes are others, and the file's size and times are as they were."""
    name = "changed" if is_seen else "rotten"
    proto = models.model([models.node("Abs", "x", name)], [models.value("x", [1])], [models.value(name, [1])])
    (tmp_path / f"{name}.onnx").write_bytes(proto.SerializeToString())
    platform.gpufn("deploy", tmp_path / f"{name}.onnx")
    assert platform.invoke(name, {"x": [-1.0]}) == {name: [1.0]}
    [pid] = _workers(platform, name)
    [engine] = platform.client.get(f"/v1/models/{name}").json()["engines"]["cpu"]
    file = platform.home / "cache" / "engines" / engine["key"] / "model.onnx"
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 0xFF
    file.chmod(0o600)
    file.write_bytes(content)
    if not is_seen:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.kill(pid, signal.SIGKILL)
    until(lambda: platform.post(name, {"x": [-2.0]}).text == f'{{"{name}":[2.0]}}', "served again")
    assert file.read_bytes() != content


def _workers(platform: Platform, function: str) -> list[int]:
    """Wait until the node reports workers of the function. Return their pids."""
    found: list[int] = []

    def look() -> bool:
        nodes = platform.client.get("/v1/nodes").json()["nodes"]
        found[:] = [each["pid"] for node in nodes for each in node["processes"] if each["function"] == function]
        return bool(found)

    until(look, "reported")
    return found
