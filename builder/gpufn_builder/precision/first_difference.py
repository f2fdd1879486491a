"""The first node of a graph whose output differs in another precision, and the layers to keep in fp32 because of it.

The original and the converted graph run on one case with all their values as outputs: the original in ONNX Runtime on
the CPU, the converted one there or in an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper

from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.checks.samples import Case
from gpufn_builder.checks.steps import OnStep, ignore_step
from gpufn_builder.checks.verify import compare, exceeds
from gpufn_builder.onnx_model.graph_names import element_types, referenced_names, text
from gpufn_builder.onnx_model.normalise import NormalModel
from gpufn_builder.onnx_model.tensors import Array, Arrays, datatype_of
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TensorSpec, Tolerance

_STAGE: Final = BuildStage.TRANSFORM
_PROBE: Final = "probe.onnx"

# Runs the graph in a file on a case, and returns its outputs. Raises BuildFailed.
RunGraph = Callable[[Path, Sequence[TensorSpec], Case], Arrays]


@dataclass(frozen=True)
class Difference:
    """`reason` describes the limit that an output of `node` exceeds."""

    node: NodeProto
    reason: str


def find_first_difference(
    model: NormalModel,
    converted: Path,
    lowered: Mapping[str, str],
    half: int,
    *,
    case: Case,
    limits: Sequence[Tolerance],
    run_converted: RunGraph | None = None,
    on_step: OnStep = ignore_step,
) -> Difference | None:
    """Return the first node whose output exceeds the first of `limits`; if there is none, the second, and so on.
    `lowered` maps values to their names in element type `half` in the graph `converted`, which `run_converted` runs: by
    default, ONNX Runtime on the CPU.

    Raises BuildFailed if a graph does not run with all its values as outputs, which need memory at the same time.
    """
    graph = onnx.load(model.path, load_external_data=False).graph
    types = element_types(graph)
    floats = [name for node in graph.node for name in node.output if types.get(name) == TensorProto.FLOAT]
    on_step(f"{case.name} with all values")
    run_on_cpu = partial(_run_on_cpu, has_integer_products=model.has_integer_products)
    exact = _values(model.path, dict.fromkeys(floats, TensorProto.FLOAT), case, run_on_cpu)
    present = {
        name for node in onnx.load(converted, load_external_data=False).graph.node for name in node.output
    }.intersection({*floats, *lowered.values()})
    names = {name: lowered.get(name, name) for name in floats if lowered.get(name, name) in present}
    wanted = {name: half if value in lowered else TensorProto.FLOAT for value, name in names.items()}
    on_step(f"{case.name} with all converted values")
    rounded = _values(converted, wanted, case, run_converted or run_on_cpu)
    for tolerance in limits:
        for node in graph.node:
            on_step(f"comparison of {name_of(node)}")
            for value in node.output:
                if value in names and (reason := _difference(exact[value], rounded[names[value]], tolerance)):
                    return Difference(node, reason)
    return None


def layers_to_keep(graph: GraphProto, node: NodeProto, layers: Collection[str]) -> list[NodeProto]:
    """Return `node` if its first output is one of `layers`, else all nearest nodes before it of which this is true: the
    rounding of each of them reaches `node`."""
    producers = {name: each for each in graph.node for name in each.output}
    waiting, seen, found = deque([node]), {node.output[0]}, []
    while waiting:
        each = waiting.popleft()
        if each.output[0] in layers:
            found.append(each)
            continue
        for name in referenced_names(each):
            if name in producers and producers[name].output[0] not in seen:
                seen.add(producers[name].output[0])
                waiting.append(producers[name])
    return found


def name_of(node: NodeProto) -> str:
    return text(node.name) or text(node.output[0])


def _values(path: Path, elements: Mapping[str, int], case: Case, run: RunGraph) -> Arrays:
    """Run the graph at `path` with the values `elements`, which are names with element types, as further outputs."""
    proto = onnx.load(path, load_external_data=False)
    outputs = {output.name for output in proto.graph.output}
    proto.graph.output.extend(
        helper.make_tensor_value_info(name, element, None) for name, element in elements.items() if name not in outputs
    )
    probe = path.with_name(_PROBE)
    probe.write_bytes(proto.SerializeToString())
    specs = [TensorSpec(name, datatype_of(element) or "", ()) for name, element in elements.items()]
    try:
        return run(probe, specs, case)
    finally:
        probe.unlink()


def _run_on_cpu(path: Path, outputs: Sequence[TensorSpec], case: Case, *, has_integer_products: bool) -> Arrays:
    return CpuSession(path, outputs, _STAGE, has_integer_products=has_integer_products).run(case.inputs)


def _difference(exact: Array, rounded: Array, tolerance: Tolerance) -> str:
    try:
        comparison = compare([""], [{"": exact}], [{"": rounded.astype(exact.dtype)}], tolerance, stage=_STAGE)
    except BuildFailed:
        return "it has NaNs or another shape"
    return exceeds(comparison.outputs[0], tolerance)
