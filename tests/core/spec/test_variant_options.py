"""Options that a caller changes."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.errors import InvalidInput
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec, ScalingPolicy
from gpufn_core.spec.naming.variant_options import apply

SPEC = FunctionSpec(
    name="clf",
    entry=EntryPoint("app", "clf"),
    methods=(MethodSpec(),),
    scaling=ScalingPolicy(min_workers=2, max_workers=4),
)


def test_options_change_the_spec_and_nothing_else() -> None:
    spec = apply(SPEC, {"gpu": ["L4:2", "A10:2"], "memory": "1Gi", "max_workers": 1, "retries": 3, "concurrency": 8})
    assert (spec.resources.gpu, spec.resources.gpu_count, spec.resources.memory_bytes) == (("L4", "A10"), 2, 1 << 30)
    assert (spec.scaling.min_workers, spec.scaling.max_workers, spec.concurrency) == (0, 1, 8)
    assert spec.retries is not None
    assert spec.retries.attempts == 3
    assert (spec.name, spec.entry, spec.timeout_s) == (SPEC.name, SPEC.entry, SPEC.timeout_s)
    assert apply(SPEC, {}) is SPEC


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gpus": "L4"}, "gpus"),
        ({"env": {"A": "1"}}, "env"),
        ({"gpu": "cpu"}, "gpu"),
        ({"memory": "many"}, "memory"),
        ({"cpu": "two"}, "cpu"),
        ({"max_workers": -1}, "max_workers"),
        ({"vram": "6Gi"}, "vram"),  # only a part of a GPU has a limit
        ({"share": "half"}, "share"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        apply(SPEC, options)
    assert refused.value.field == field
