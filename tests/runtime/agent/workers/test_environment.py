"""The environment with which a worker starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_runtime.agent.workers.environment import worker_environment


@pytest.mark.parametrize("is_sandboxed", [True, False])
def test_a_worker_starts_with_the_functions_variables_only_without_a_sandbox(*, is_sandboxed: bool) -> None:
    """Python loads code that PYTHONPATH names before any line of the worker runs."""
    env = {"PYTHONPATH": "/evil", "OPENSSL_CONF": "/evil", "OMP_NUM_THREADS": "9"}
    spec = FunctionSpec(name="f", entry=EntryPoint("app", "f"), methods=(MethodSpec(),), env=env)
    environment = worker_environment(spec, Path("/scratch"), (), is_sandboxed=is_sandboxed)
    assert (environment.items() >= env.items()) is not is_sandboxed
    assert ("/evil" in environment.values()) is not is_sandboxed
