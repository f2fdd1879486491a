"""Some node tests on a whole running platform: deployed with the SDK, called with tritonclient.

`test_bulk` tests the computations; these tests cover the transfer of values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto
from tritonclient import http as triton

from gpufn import Client, Model
from gpufn.deploy import deployables, deployment
from tests.conformance import requests, suite
from tests.conftest import Platform

pytestmark = pytest.mark.e2e

# Cases in one model have the same versions of the operators: a build takes a second. Together they have
#   every datatype as input and as output
#   texts: UTF-8, of rank 0, and an empty tensor
#   several outputs, and several inputs
#   no inputs, only scalars, and empty tensors
#   shapes that depend on values, nested graphs, many dimensions, infinities.
MODELS: Mapping[str, Sequence[str]] = {
    "integers": (
        "test_add_int8",
        "test_add_int16",
        "test_mul_uint16",
        "test_div_uint32",
        "test_sub_uint8",
        "test_tril_zero",
    ),
    "casts": (
        "test_castlike_FLOAT_to_BFLOAT16",
        "test_castlike_FLOAT16_to_DOUBLE",
        "test_castlike_DOUBLE_to_FLOAT16",
        "test_constantofshape_int_shape_zero",
    ),
    "texts": (
        "test_string_concat_utf8",
        "test_string_concat_zero_dimensional",
        "test_string_split_empty_tensor",
        "test_isinf_negative",
    ),
    "shapes": ("test_max_uint64", "test_nonzero_example", "test_sce_NCd1d2d3d4d5_mean_weight"),
    "graphs": ("test_dynamicquantizelinear", "test_loop11"),
    **{
        name: (name,)
        for name in (
            "test_cumprod_2d_int32",
            "test_equal_string",
            "test_ai_onnx_ml_label_encoder_string_int",
            "test_top_k",
            "test_attention_3d_diff_heads_with_past_and_present",
            "test_constant",
            "test_bitcast_scalar_float32_to_int32",
        )
    },
}
CASES = [name for names in MODELS.values() for name in names]
# Cases that also run with inputs of dynamic sizes.
DYNAMIC = (
    "test_softmax_large_number",
    "test_string_concat",
    "test_castlike_FLOAT_to_FLOAT16",
)

_STAYS = "stays"


class Deploying:
    """Cases as models of a running platform, each with its own name. The next case is built during calls of one case.

    One more model stays deployed throughout: a node without models ends its templates, and the next worker would import
    ONNX Runtime again.
    """

    def __init__(self, platform: Platform, folder: Path, cases: Sequence[suite.Case]) -> None:
        self._platform = platform
        self._folder = folder
        self._cases = cases
        self._deploys: dict[int, Future[str]] = {}
        self._pool = ThreadPoolExecutor()

    def __enter__(self) -> Deploying:
        self._deploy(_STAYS, self._cases[0])
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._delete(_STAYS)

    @contextlib.contextmanager
    def model(self, number: int) -> Iterator[str]:
        """Deploy the case at this index. Yield the name of its function."""
        for each in range(number, min(number + 2, len(self._cases))):
            if each not in self._deploys:
                self._deploys[each] = self._pool.submit(self._deploy, f"case-{each}", self._cases[each])
        name = self._deploys[number].result()
        try:
            yield name
        finally:
            self._delete(name)

    def _deploy(self, name: str, case: suite.Case) -> str:
        model, samples = suite.write(case, self._folder / name)
        net = Model(model, samples=samples, max_batch=suite.max_batch(case))
        deployable = deployables.deployable_model(net, {"name": name})
        with Client(self._platform.url) as client:
            deployment.finish(client, deployment.deploy(client, deployable))
        return name

    def _delete(self, name: str) -> None:
        assert self._platform.client.delete(f"/v1/functions/{name}").status_code == 204


@functools.cache
def cases() -> list[suite.Case]:
    dynamic = [suite.cases_without_pools()[name] for name in DYNAMIC]
    return [suite.joined([suite.cases_without_pools()[name] for name in names]) for names in MODELS.values()] + [
        replace(case, model=with_dynamic_sizes(case.model)) for case in dynamic
    ]


@pytest.fixture(scope="module")
def deploying(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deploying]:
    with Deploying(platform, tmp_path_factory.mktemp("cases"), cases()) as deploying:
        yield deploying


@pytest.fixture(scope="module")
def client(platform: Platform) -> Iterator[Any]:
    with triton.InferenceServerClient(platform.url.removeprefix("http://"), network_timeout=60) as client:
        yield client


@pytest.mark.parametrize(
    "number", range(len(MODELS) + len(DYNAMIC)), ids=[*MODELS, *(f"{name}_dynamic" for name in DYNAMIC)]
)
def test_a_case_is_deployed_and_called(deploying: Deploying, client: Any, number: int) -> None:
    case = cases()[number]
    with deploying.model(number) as name:
        result = client.infer(name, requests.inputs(case), outputs=requests.wanted(case))
        case.check(requests.arrays(case, result))


def test_every_datatype_is_among_them() -> None:
    for side in ("inputs", "outputs"):
        found = {
            np.dtype(array.dtype).name
            for name in CASES
            for array in getattr(suite.cases_without_pools()[name], side).values()
        }
        assert found == {
            "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
            "float16", "bfloat16", "float32", "float64", "object",
        }, side  # fmt: skip


def with_dynamic_sizes(model: ModelProto) -> ModelProto:
    dynamic = ModelProto()
    dynamic.CopyFrom(model)
    for value in dynamic.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    for value in dynamic.graph.output:
        value.type.tensor_type.ClearField("shape")
    return dynamic
