"""The reference outputs: the original model, run on the CPU for every case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.checks.samples import Case
from gpufn_builder.checks.steps import OnStep, ignore_step
from gpufn_builder.onnx_model.normalise import NormalModel
from gpufn_builder.onnx_model.tensors import Array, Arrays, dtype_of, is_float
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import TensorSpec

_STAGE: Final = BuildStage.REFERENCE
_REMEDY: Final = "If generated inputs make no sense to the model, set samples= (--samples FILE) to real inputs"
_failed = partial(BuildFailed, stage=_STAGE)


def run_reference(
    model: NormalModel,
    cases: Sequence[Case],
    on_step: OnStep = ignore_step,
    *,
    verify: bool = True,
) -> list[Arrays]:
    """Return the outputs of each case, in fp32 where the model uses fp32. Raises BuildFailed(stage="reference").
    `on_step` receives the name of each case before its run.

    A model cannot be verified if its outputs differ between two sessions, or if an output is entirely NaN for a user's
    sample or for all generated cases. Other NaNs are kept, and counted where outputs are compared.
    """
    session = _session(model)
    outputs = []
    for case in cases:
        on_step(case.name)
        outputs.append(_run(session, case))
    _check_types(model.outputs, outputs)
    if verify:
        _check_nans(cases, outputs)
        if cases:
            on_step(f"{cases[0].name} again")
            # A session continues its sequence of random numbers, so only a new one repeats them.
            _check_repeatable(cases[0], outputs[0], _session(model) if model.random_nodes else session)
    return outputs


def _session(model: NormalModel) -> CpuSession:
    return CpuSession(model.path, model.outputs, _STAGE, has_integer_products=model.has_integer_products)


def observe(model: NormalModel, outputs: Sequence[Arrays]) -> NormalModel:
    """Return `model` with the observed shapes of its outputs. A size that was declared fixed but varies becomes
    dynamic. A rank that was not declared, or that all cases contradict, becomes the observed rank, with dynamic sizes.
    Raises BuildFailed for an output whose rank varies."""
    specs = tuple(_observed(spec, [each[spec.name].shape for each in outputs]) for spec in model.outputs)
    batched = model.batched and all(spec.shape[:1] == (-1,) for spec in specs)
    return replace(model, outputs=specs, batched=batched)


def _run(session: CpuSession, case: Case) -> Arrays:
    try:
        return session.run(case.inputs)
    except BuildFailed as error:
        if case.is_user_sample:
            raise _failed(f"{error.message} ({case.name})", node=error.node) from error
        message = f"with generated inputs ({case.name}), {error.message}. {_REMEDY}"
        raise _failed(message, node=error.node) from error


def _check_types(declared: Sequence[TensorSpec], results: Sequence[Arrays]) -> None:
    """Check the types, because ONNX Runtime does not check an output that is also an input."""
    for spec in declared:
        for outputs in results:
            if (dtype := outputs[spec.name].dtype) != dtype_of(spec.datatype):
                message = f"output {spec.name} is declared as {spec.datatype}, but is {dtype}"
                raise _failed(message, node=spec.name)


def _check_nans(cases: Sequence[Case], results: Sequence[Arrays]) -> None:
    all_nan = [{name for name, array in outputs.items() if _is_all_nan(array)} for outputs in results]
    for case, names in zip(cases, all_nan, strict=True):
        if case.is_user_sample and names:
            name = min(names)
            raise _failed(f"output {name} is entirely NaN for {case.name}", node=name)
    if always := set.intersection(*all_nan) if all_nan else set():
        name = min(always)
        raise _failed(f"output {name} is entirely NaN for all generated inputs. {_REMEDY}", node=name)


def _is_all_nan(array: Array) -> bool:
    return bool(array.size and is_float(array) and np.isnan(array).all())


def _check_repeatable(case: Case, outputs: Arrays, session: CpuSession) -> None:
    again = session.run(case.inputs)
    for name, array in outputs.items():
        if not _is_identical(array, again[name]):
            problem = f"output {name} differs between two runs on the same input ({case.name})"
            raise _failed(f"{problem}, so it cannot be verified: set verify=False (--no-verify)", node=name)


def _is_identical(one: Array, other: Array) -> bool:
    if one.dtype.kind == "O":
        return np.array_equal(one, other)
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _observed(spec: TensorSpec, shapes: Sequence[tuple[int, ...]]) -> TensorSpec:
    if not shapes:
        return spec
    rank = len(shapes[0])
    for shape in shapes:
        if len(shape) != rank:
            message = f"output {spec.name} has {rank} dimensions in one case and {len(shape)} in another"
            raise _failed(message, node=spec.name)
    declared = spec.shape if len(spec.shape) == rank else (-1,) * rank
    shape = tuple(size if all(each[axis] == size for each in shapes) else -1 for axis, size in enumerate(declared))
    return TensorSpec(spec.name, spec.datatype, shape)
