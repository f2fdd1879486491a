"""A case as a request of the Open Inference Protocol. tritonclient, not gpufn, encodes and decodes it.

tritonclient sends half floats in binary only, so this module encodes them in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tritonclient import http as triton
from tritonclient.utils import np_to_triton_dtype

from gpufn_core.encoding import media
from tests.conformance.suite import Case


def inputs(case: Case) -> list[Any]:
    """Return the inputs in binary, as `infer` accepts them."""
    found = []
    for name, array in case.inputs.items():
        tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(np.array(array, order="C"))
        found.append(tensor)
    return found


def wanted(case: Case) -> list[Any]:
    return [triton.InferRequestedOutput(name) for name in case.outputs]


def binary(case: Case) -> tuple[str, bytes]:
    """Return the content type, as between gateway and worker, and the body."""
    body, header_bytes = triton.InferenceServerClient.generate_request_body(inputs(case), outputs=wanted(case))
    return media.tensors(header_bytes), body


def in_json(case: Case) -> tuple[str, bytes] | None:
    """Return the request in JSON; None for a case with infinities or NaN, which JSON cannot represent."""
    tensors = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": np_to_triton_dtype(array.dtype),
            "data": array.reshape(-1).tolist(),
        }
        for name, array in case.inputs.items()
    ]
    try:
        return media.tensors(None), json.dumps({"inputs": tensors}, allow_nan=False).encode()
    except ValueError:
        return None


def can_be_read_in_json(case: Case) -> bool:
    return all(array.dtype == np.object_ or bool(np.isfinite(array).all()) for array in case.outputs.values())


def outputs(case: Case, content_type: str, body: bytes) -> Sequence[Any]:
    """Return the arrays of a response in the order of the model's outputs."""
    result = triton.InferResult.from_response_body(body, header_length=media.header_bytes(content_type))
    return arrays(case, result)


def arrays(case: Case, result: Any) -> list[Any]:
    """Return the arrays of tritonclient's result; texts as str, as in ONNX."""
    return [_decoded(result.as_numpy(name)) for name in case.outputs]


def _decoded(array: Any) -> Any:
    if array.dtype != np.object_:
        return array
    texts = [text.decode() if isinstance(text, bytes) else text for text in array.reshape(-1)]
    return np.array(texts, np.object_).reshape(array.shape)
