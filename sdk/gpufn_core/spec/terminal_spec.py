"""The spec of a terminal: a copy of a function's spec for one worker that runs a command instead of calls. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_core.spec.function_spec import SESSIONS, FunctionSpec, ScalingPolicy

LONGEST_S: Final = 8 * 3600.0  # lifetime of a terminal, from its start
WAITS_S: Final = 600.0  # for its worker
# The worker ends with its first session. The time is for a worker whose session was cancelled before it started.
_SCALING: Final = ScalingPolicy(max_workers=1, idle_timeout_s=10.0, scaledown_window_s=0.0)


def terminal_spec(spec: FunctionSpec) -> FunctionSpec:
    """Return the spec of a terminal in the environment of a function. The resources, files, packages, variables,
    secrets and isolation are the function's. Raises InvalidInput for a function that cannot have one."""
    if spec.resources.nodes > 1:
        raise InvalidInput(
            f"{spec.name} runs on {spec.resources.nodes} nodes, and a terminal on one: deploy it with nodes=1 under "
            "another name"
        )
    return msgspec.structs.replace(
        spec,
        methods=SESSIONS,
        is_class=False,
        constructor=msgspec.UNSET,
        scaling=_SCALING,
        concurrency=1,
        batch=None,
        timeout_s=LONGEST_S,
        queue_timeout_s=WAITS_S,
        retries=None,
        schedule=None,
        webhook=None,
        max_calls=1,
        serves=msgspec.UNSET,
        max_variants=msgspec.UNSET,
        web=msgspec.UNSET,
        modules=(),
    )
