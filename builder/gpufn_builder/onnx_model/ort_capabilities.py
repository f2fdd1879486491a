"""Probes of the installed ONNX Runtime for the IR versions and opsets that it supports; it has no API for that."""

from __future__ import annotations

import functools
from typing import Final

import onnx
import onnxruntime
from onnx import TensorProto, helper

_SILENT: Final = 4
_OLDEST_IR: Final = 8
_RUNTIMES_OWN: Final = "com.microsoft"  # operators that its tools, and some exporters, add to a model
_OLDEST_OPSET: Final = {"": 17, "ai.onnx.ml": 3, _RUNTIMES_OWN: 1}


@functools.cache
def newest_ir_version() -> int:
    """Return the newest supported version of the file format."""
    for version in range(onnx.IR_VERSION, _OLDEST_IR, -1):
        if _accepts(version, {"": _OLDEST_OPSET[""]}):
            return version
    return _OLDEST_IR


@functools.cache
def domains() -> frozenset[str]:
    """Return the domains of ONNX itself, including the main one, "", and ONNX Runtime's own domain."""
    return frozenset(schema.domain for schema in onnx.defs.get_all_schemas()) | {_RUNTIMES_OWN}


@functools.cache
def newest_opset(domain: str) -> int:
    """Return the newest opset of `domain` that ONNX Runtime accepts as released; 0 for an unknown domain."""
    oldest = _OLDEST_OPSET.get(domain, 0)
    known = _newest_known(domain) if domain else onnx.defs.onnx_opset_version()
    for opset in range(known, oldest, -1):
        if _accepts(newest_ir_version(), {"": _OLDEST_OPSET[""], domain: opset}):
            return opset
    return oldest


def _newest_known(domain: str) -> int:
    return max((schema.since_version for schema in onnx.defs.get_all_schemas() if schema.domain == domain), default=0)


def _accepts(ir_version: int, opsets: dict[str, int]) -> bool:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    model = helper.make_model(
        helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [value], [result]),
        ir_version=ir_version,
        opset_imports=[helper.make_opsetid(domain, opset) for domain, opset in opsets.items()],
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # the exceptions of the bindings have no common base class
        return False
    return True
