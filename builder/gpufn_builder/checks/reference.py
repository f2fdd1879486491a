"""What the outputs have to be: the model as it came, on the CPU, for every case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.checks.samples import Case
from gpufn_builder.onnx_model.normalise import NormalModel
from gpufn_builder.onnx_model.tensors import Array, Arrays, dtype_of, is_float
from gpufn_core.domain.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TensorSpec

_STAGE: Final = BuildStage.REFERENCE


def run_reference(model: NormalModel, cases: Sequence[Case]) -> list[Arrays]:
    """The outputs of each case, in fp32 where the model says fp32. Raises BuildFailed(stage="reference").

    A model whose outputs differ between two runs, and one with an output that is NaN all over, for a sample of the
    user's or for all that was generated, have nothing to be checked against. Other NaNs are kept, and counted where
    outputs are compared.
    """
    session = CpuSession(model.path, model.outputs, _STAGE, has_integer_products=model.has_integer_products)
    found = [_run(session, case) for case in cases]
    _check_types(model.outputs, found)
    _check_nans(cases, found)
    if cases:
        _check_again(cases[0], found[0], session)
    return found


def observe(model: NormalModel, outputs: Sequence[Arrays]) -> NormalModel:
    """`model` with the shapes of its outputs as they were seen: a size that was declared fixed and is not becomes
    dynamic, and unranked outputs get their dimensions. BuildFailed for an output whose rank changes."""
    specs = tuple(
        _observed(spec, [each[spec.name].shape for each in outputs], spec.name in model.unranked)
        for spec in model.outputs
    )
    batched = model.batched and all(spec.shape[:1] == (-1,) for spec in specs)
    return replace(model, outputs=specs, batched=batched, unranked=())


def _run(session: CpuSession, case: Case) -> Arrays:
    try:
        return session.run(case.inputs)
    except BuildFailed as error:
        if case.is_given:
            raise BuildFailed(f"{error.message} ({case.name})", stage=error.stage, node=error.node) from error
        raise BuildFailed(
            f"{error.message} ({case.name}; if the inputs that were generated for it make no sense to the model, give "
            "samples=)",
            stage=error.stage,
            node=error.node,
        ) from error


def _check_types(declared: Sequence[TensorSpec], found: Sequence[Arrays]) -> None:
    """ONNX Runtime does not look at an output that is an input as well."""
    for spec in declared:
        for outputs in found:
            if (dtype := outputs[spec.name].dtype) != dtype_of(spec.datatype):
                raise BuildFailed(
                    f"output {spec.name} is declared as {spec.datatype}, and comes out as {dtype}",
                    stage=_STAGE,
                    node=spec.name,
                )


def _check_nans(cases: Sequence[Case], found: Sequence[Arrays]) -> None:
    empty = [{name for name, array in outputs.items() if _is_nan_all_over(array)} for outputs in found]
    for case, names in zip(cases, empty, strict=True):
        if case.is_given and names:
            name = min(names)
            raise BuildFailed(f"output {name} is NaN all over for {case.name}", stage=_STAGE, node=name)
    if always := set.intersection(*empty) if empty else set():
        name = min(always)
        raise BuildFailed(
            f"output {name} is NaN all over for all inputs that were generated: if they make no sense to the model, "
            "give samples=",
            stage=_STAGE,
            node=name,
        )


def _is_nan_all_over(array: Array) -> bool:
    return bool(array.size and is_float(array) and np.isnan(array).all())


def _check_again(case: Case, outputs: Arrays, session: CpuSession) -> None:
    again = session.run(case.inputs)
    for name, array in outputs.items():
        if not _is_identical(array, again[name]):
            raise BuildFailed(
                f"output {name} differs between two runs on the same input ({case.name}): a model that draws random "
                "numbers cannot be checked",
                stage=_STAGE,
                node=name,
            )


def _is_identical(one: Array, other: Array) -> bool:
    if one.dtype.kind == "O":
        return np.array_equal(one, other)
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _observed(spec: TensorSpec, shapes: Sequence[tuple[int, ...]], is_unranked: bool) -> TensorSpec:
    if not shapes:
        return spec
    declared = (-1,) * len(shapes[0]) if is_unranked else spec.shape
    for shape in shapes:
        if len(shape) != len(declared):
            raise BuildFailed(
                f"output {spec.name} has {len(declared)} dimensions in one place and {len(shape)} in another",
                stage=_STAGE,
                node=spec.name,
            )
    shape = tuple(size if all(each[axis] == size for each in shapes) else -1 for axis, size in enumerate(declared))
    return TensorSpec(spec.name, spec.datatype, shape)
