"""Layers that stay in fp32 because an engine is not accurate enough, although the converted graph is.

The conversion was checked in ONNX Runtime on the CPU. Kernels of another backend add and round differently. So the
engine is compiled again with all values as outputs, which shows the first node that differs. All values as outputs
prevent fusions. If no value differs then, the products before the output that failed are kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from onnx import NodeProto, TensorProto

from gpufn_builder.checks.inaccurate_output import InaccurateOutput
from gpufn_builder.checks.samples import Case
from gpufn_builder.checks.steps import OnStep
from gpufn_builder.onnx_model.normalise import NormalModel
from gpufn_builder.precision.conversion import HALVES, Conversion, convert, listed
from gpufn_builder.precision.first_difference import (
    Difference,
    RunGraph,
    find_first_difference,
    layers_to_keep,
    name_of,
)
from gpufn_builder.precision.transform import TransformedModel
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TOLERANCES, Precision, Tolerance

MAX_ROUNDS: Final = 4  # each compiles two engines


@dataclass(frozen=True)
class Converted:
    """The conversion of a model, and the arguments for another one. `cases` are by name."""

    model: NormalModel
    transformed: TransformedModel
    precision: Precision
    tolerance: Tolerance | None
    cases: dict[str, Case]
    on_gpu: bool
    on_cpu: bool


class EngineLayers:
    """The graph of one candidate. `run_engine` compiles a graph with the candidate's compiler and runs the engine.
    `into` is the folder for its own conversions. `for_gpu` chooses the graph of the conversion."""

    def __init__(
        self, converted: Converted, into: Path, run_engine: RunGraph, *, for_gpu: bool, on_step: OnStep
    ) -> None:
        self._converted = converted
        self._into = into
        self._run_engine = run_engine
        self._for_gpu = for_gpu
        self._on_step = on_step
        self._conversion = converted.transformed.conversion
        self._kept: list[NodeProto] = []
        self._first = ""
        self._rounds = 0

    @property
    def path(self) -> Path:
        source = self._conversion or self._converted.transformed
        return source.path if self._for_gpu else source.cpu_path

    @property
    def remark(self) -> str:
        """Describe the layers that stay in fp32 for this engine; empty if there are none."""
        return f"kept in fp32 for this engine: {listed(self._names)}; {self._first}" if self._kept else ""

    def keep_more(self, failure: InaccurateOutput) -> bool:
        """Convert the model again, with the layers that cause `failure` in fp32. Return False if that is impossible."""
        converted, conversion = self._converted, self._conversion
        case = converted.cases.get(failure.case)
        if conversion is None or converted.tolerance is None or case is None or self._rounds == MAX_ROUNDS:
            return False
        graph = onnx.load(converted.model.path, load_external_data=False).graph
        difference = self._difference(conversion, case, converted.tolerance)
        if difference is None:
            node = next((each for each in graph.node if failure.node in each.output), None)
            if node is None:
                return False
            difference = Difference(node, "no value before it differs if all values are outputs")
        precision = converted.precision
        self._first = self._first or (
            f"the first node that differs in the engine is {name_of(difference.node)} ({difference.reason})"
        )
        layers = layers_to_keep(graph, difference.node, conversion.layers)
        if not 0 < len(layers) < len(conversion.layers):
            return False
        again = self._convert([*self._kept, *layers], precision)
        if again is None:
            return False
        if conversion is not converted.transformed.conversion:
            shutil.rmtree(conversion.path.parent)
        self._conversion = again
        self._kept += layers
        return True

    def explained(self, failure: InaccurateOutput) -> BuildFailed:
        """Return `failure` with the first node that differs, and the layers that were kept in vain."""
        parts = [failure.message, self._first]
        if self._kept:
            parts.append(f"outputs still differ with these layers in fp32: {listed(self._names)}")
        return BuildFailed("; ".join(filter(None, parts)), stage=failure.stage, node=failure.node, log=failure.log)

    @property
    def _names(self) -> Sequence[str]:
        return [name_of(node) for node in self._kept]

    def _difference(self, conversion: Conversion, case: Case, tolerance: Tolerance) -> Difference | None:
        """Return the first node that differs; None also if the engine with all values as outputs cannot be built."""
        try:
            return find_first_difference(
                self._converted.model,
                self.path,
                conversion.values,
                HALVES.get(self._converted.precision, TensorProto.FLOAT),
                case=case,
                limits=(TOLERANCES[self._converted.precision], tolerance),
                run_converted=self._run_engine,
                on_step=self._on_step,
            )
        except BuildFailed:
            return None

    def _convert(self, layers: Sequence[NodeProto], precision: Precision) -> Conversion | None:
        self._rounds += 1
        converted = self._converted
        folder = self._into / f"{precision}-{self._rounds}"
        folder.mkdir(parents=True)
        keep = [*converted.transformed.kept_outputs, *(node.output[0] for node in layers)]
        return convert(
            converted.model,
            precision,
            list(converted.cases.values()),
            folder,
            keep,
            on_gpu=converted.on_gpu,
            on_cpu=converted.on_cpu,
            on_step=self._on_step,
        )
