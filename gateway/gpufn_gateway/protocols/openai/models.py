"""Models: functions that declare an API of OpenAI."""

from __future__ import annotations

from starlette.requests import Request

from gpufn_core.errors import FunctionNotFound
from gpufn_core.spec.function_spec import Serves
from gpufn_core.spec.naming.names import shown
from gpufn_gateway.functions.target import Target
from gpufn_gateway.protocols.platform import Platform


def named(platform: Platform, model: str, serves: Serves, request: Request) -> Target:
    """Return the model if its function serves this API. Raises FunctionNotFound, Forbidden."""
    target = platform.resolve(model, request)
    if target.revision.spec.serves is not serves:
        raise FunctionNotFound(f"{shown(model)} does not declare serves={serves.value!r}.")
    return target
