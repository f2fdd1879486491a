"""Conversion of a model to the requested precision: rewrites the graph and checks its accuracy before compilation.

If the outputs are not accurate enough, the layers that lose the accuracy stay in fp32. `identity.tools` lists the tools
and versions that rewrite the graph.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import onnx
from onnx import NodeProto, TensorProto

from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.checks.samples import Case
from gpufn_builder.checks.steps import OnStep, ignore_step
from gpufn_builder.checks.verify import Comparison, check, compare
from gpufn_builder.onnx_model.normalise import NormalModel
from gpufn_builder.onnx_model.tensors import Arrays
from gpufn_builder.precision.conversion import HALVES, Conversion, convert, listed
from gpufn_builder.precision.first_difference import Difference, find_first_difference, layers_to_keep, name_of
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TOLERANCES, Precision, Tolerance

_STAGE: Final = BuildStage.TRANSFORM
MAX_ROUNDS: Final = 8  # each costs a conversion, and a run of a case with all its values


@dataclass(frozen=True)
class TransformedModel:
    """`path`, `cpu_path` and `summary` come from the `conversion`, which is None if nothing was changed. `comparison`
    is with the reference; None if nothing was changed or verified.

    `kept` are the names of layers that stay in fp32, because the outputs are not accurate enough without them.
    `kept_outputs` are their first outputs.
    `first_difference` describes the first node whose output differs if no layer is kept; empty if none is.
    """

    path: Path
    cpu_path: Path
    summary: str
    comparison: Comparison | None = None
    kept: tuple[str, ...] = ()
    kept_outputs: tuple[str, ...] = ()
    first_difference: str = ""
    conversion: Conversion | None = None


@dataclass(frozen=True)
class _Failure:
    """The `error` of graph number `graph` of a conversion, and the number of the first case that fails."""

    error: BuildFailed
    graph: int
    case: int


def transform(
    model: NormalModel,
    precision: Precision,
    cases: Sequence[Case],
    *,
    reference: Sequence[Arrays],
    tolerance: Tolerance | None,
    into: Path,
    on_gpu: bool = True,
    on_cpu: bool = True,
    on_step: OnStep = ignore_step,
) -> TransformedModel:
    """Convert `model` to `precision`, in the folder `into`. `reference` are the outputs of `cases`. int8 takes a graph
    each for engines `on_gpu` and `on_cpu`; if only one is needed, both paths are the same.

    Inputs and outputs keep their types. If an output is not within `tolerance`, the layers that cause the first
    difference stay in fp32 and the model is converted again, up to MAX_ROUNDS times. Raises
    BuildFailed(stage="transform") for the worst output if that does not suffice. Without a `tolerance`, outputs are not
    compared.
    """
    if precision in (Precision.FP32, Precision.TF32):
        return TransformedModel(model.path, model.path, "unchanged")
    convert_with = partial(convert, model, precision, cases, on_gpu=on_gpu, on_cpu=on_cpu, on_step=on_step)
    conversion = convert_with(_new_folder(into, precision))
    if conversion is None:
        return TransformedModel(model.path, model.path, "unchanged: there is nothing to quantize")
    if tolerance is None:
        return TransformedModel(conversion.path, conversion.cpu_path, conversion.summary, conversion=conversion)
    checks = _OutputCheck(model, precision, cases, reference, tolerance, on_step=on_step)
    first_error: BuildFailed | None = None
    first: Difference | None = None
    kept: list[NodeProto] = []
    rounds = 0
    outcome = checks.run(conversion)
    while isinstance(outcome, _Failure):
        difference = checks.first_difference(conversion, outcome)
        first_error, first = first_error or outcome.error, first or difference
        layers = checks.layers_to_keep(conversion, difference) if difference else []
        shutil.rmtree(conversion.path.parent)
        again = None
        if layers and rounds < MAX_ROUNDS:
            rounds += 1
            keep = [node.output[0] for node in (*kept, *layers)]
            again = convert_with(_new_folder(into, f"{precision}-{rounds}"), keep)
        if again is None:
            raise _error(first_error, precision, conversion, kept, first) from first_error
        kept += layers
        conversion, outcome = again, checks.run(again, outcome)
    return TransformedModel(
        conversion.path,
        conversion.cpu_path,
        conversion.summary,
        outcome,
        tuple(map(name_of, kept)),
        tuple(node.output[0] for node in kept),
        _describe(first, precision),
        conversion,
    )


class _OutputCheck:
    """Checks conversions of `model` against the `reference`, and finds the layers that cause a failure."""

    def __init__(
        self,
        model: NormalModel,
        precision: Precision,
        cases: Sequence[Case],
        reference: Sequence[Arrays],
        tolerance: Tolerance,
        *,
        on_step: OnStep,
    ) -> None:
        self._model = model
        self._graph = onnx.load(model.path, load_external_data=False).graph
        self._precision = precision
        self._cases = cases
        self._reference = reference
        self._tolerance = tolerance
        self._on_step = on_step

    def run(self, conversion: Conversion, last: _Failure | None = None) -> Comparison | _Failure:
        """Compare all graphs and cases; first only the case of the `last` failure, which costs less."""
        if last is not None:
            # A session continues its sequence of random numbers, so the cases before are needed as well.
            first_case = 0 if self._model.random_nodes else last.case
            outcome = self._run_graph(conversion, last.graph, range(first_case, last.case + 1))
            if isinstance(outcome, _Failure):
                return outcome
        comparisons = []
        for number in range(len(conversion.checked)):
            outcome = self._run_graph(conversion, number, range(len(self._cases)))
            if isinstance(outcome, _Failure):
                return outcome
            comparisons.append(outcome)
        return Comparison(tuple(row for comparison in comparisons for row in comparison.outputs))

    def first_difference(self, conversion: Conversion, failure: _Failure) -> Difference | None:
        """Return the first node that differs by more than is usual in the precision; otherwise the first that differs
        by more than the tolerance. The tolerance is meant for outputs: values between nodes have another scale."""
        try:
            return find_first_difference(
                self._model,
                conversion.checked[failure.graph],
                conversion.values,
                HALVES.get(self._precision, TensorProto.FLOAT),
                case=self._cases[failure.case],
                limits=(TOLERANCES[self._precision], self._tolerance),
                on_step=self._on_step,
            )
        except BuildFailed:  # such as too little memory; the caller reports the output that differs
            return None

    def layers_to_keep(self, conversion: Conversion, difference: Difference) -> list[NodeProto]:
        """Return the converted layers that cause `difference`; none if no layer would remain."""
        layers = layers_to_keep(self._graph, difference.node, conversion.layers)
        return layers if len(layers) < len(conversion.layers) else []

    def _run_graph(self, conversion: Conversion, graph: int, numbers: Sequence[int]) -> Comparison | _Failure:
        model = self._model
        session = CpuSession(
            conversion.checked[graph], model.outputs, _STAGE, has_integer_products=model.has_integer_products
        )
        outputs = []
        for number in numbers:
            self._on_step(self._cases[number].name)
            outputs.append(session.run(self._cases[number].inputs))
        try:
            return self._compare(numbers, outputs)
        except BuildFailed as error:
            for number, output in zip(numbers, outputs, strict=True):
                try:
                    self._compare([number], [output])
                except BuildFailed:
                    return _Failure(error, graph, number)
            raise

    def _compare(self, numbers: Sequence[int], outputs: Sequence[Arrays]) -> Comparison:
        names = [self._cases[number].name for number in numbers]
        reference = [self._reference[number] for number in numbers]
        comparison = compare(names, reference, outputs, self._tolerance, stage=_STAGE)
        check(comparison, self._tolerance, _STAGE)
        return comparison


def _new_folder(into: Path, name: str) -> Path:
    folder = into / name
    folder.mkdir(parents=True)
    return folder


def _error(
    error: BuildFailed,
    precision: Precision,
    conversion: Conversion,
    kept: Sequence[NodeProto],
    first: Difference | None,
) -> BuildFailed:
    parts = [f"in {precision} {error.message}", _describe(first, precision)]
    if kept:
        parts.append(f"outputs still differ with these layers in fp32: {listed([name_of(node) for node in kept])}")
    if conversion.too_large:
        parts.append(f"{listed(conversion.too_large)} cannot be represented in {precision}")
    node = name_of(first.node) if first else error.node
    return BuildFailed("; ".join(filter(None, parts)), stage=_STAGE, node=node)


def _describe(first: Difference | None, precision: Precision) -> str:
    if first is None:
        return ""
    return f"the first node that differs in {precision} is {name_of(first.node)} ({first.reason})"
