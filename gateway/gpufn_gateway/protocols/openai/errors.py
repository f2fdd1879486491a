"""Errors as OpenAI's error objects."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from gpufn_core.errors import FunctionNotFound
from gpufn_gateway.problems import Problem
from gpufn_gateway.protocols.adapter import JsonErrors

_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_object(problem: Problem) -> dict[str, Any]:
    info = problem.info
    kind = _TYPES.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    code = "model_not_found" if info.code == FunctionNotFound.code else info.code
    return {"message": info.message, "type": kind, "param": info.field, "code": code}


class OpenAIErrors(JsonErrors):
    """Errors as `{"error": {...}}`. Arguments that do not fit are a 400."""

    statuses: ClassVar = {422: 400}

    def body(self, problem: Problem) -> object:
        return {"error": error_object(problem)}
