"""The floors of outputs: differences that rounding alone explains.

ONNX Runtime's optimizer adds in another order and multiplies constants into others, which is no error. So the model
runs with all optimizations as well. The largest change of an output, times a factor, is its floor, up to a share of its
largest element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from gpufn_builder.checks.cpu_session import CpuSession
from gpufn_builder.checks.samples import Case
from gpufn_builder.checks.steps import OnStep, ignore_step
from gpufn_builder.onnx_model.normalise import NormalModel
from gpufn_builder.onnx_model.tensors import Array, Arrays, is_float
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed

OPTIMIZER_FACTOR: Final = 4.0  # other compilers round in yet another order, and their kernels differ more
LARGEST_SHARE: Final = 1e-2  # share of the largest element; the optimizer may also have errors, which are not rounding


def rounding_floors(
    model: NormalModel, cases: Sequence[Case], reference: Sequence[Arrays], on_step: OnStep = ignore_step
) -> list[dict[str, float]]:
    """Return the floor of each float output, for each case. `on_step` receives each case before its run."""
    optimized: list[Arrays] = []
    try:
        session = CpuSession(
            model.path,
            model.outputs,
            BuildStage.REFERENCE,
            has_integer_products=model.has_integer_products,
            is_optimized=True,
        )
        for case in cases:
            on_step(f"{case.name} with optimizations")
            optimized.append(session.run(case.inputs))
    except BuildFailed:  # the compilers may still accept the model; ONNX Runtime's reports the reason
        optimized = [{} for _ in cases]
    return [
        {name: floor_of(array, outputs.get(name, array)) for name, array in each.items() if is_float(array)}
        for each, outputs in zip(reference, optimized, strict=True)
    ]


def floor_of(exact: Array, optimized: Array) -> float:
    """Return the floor of an output from its values without and with optimizations."""
    if exact.shape != optimized.shape:
        return 0.0
    finite = np.isfinite(exact) & np.isfinite(optimized)
    exact, optimized = exact[finite].astype(np.float64), optimized[finite].astype(np.float64)
    change, largest = np.abs(exact - optimized).max(initial=0.0), np.abs(exact).max(initial=0.0)
    return float(min(OPTIMIZER_FACTOR * change, LARGEST_SHARE * largest))
