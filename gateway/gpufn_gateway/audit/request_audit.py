"""The audited requests, and the contents of their records.

Audited are all requests that change something other than a call, by the routes that Starlette found, so a new native
route is audited without further code. The adapter of another protocol lists its audited routes, since most of them are
calls. Every refusal for a missing or insufficient key is audited, of calls too.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import msgspec

from gpufn_core.domain.audit import LONGEST_TEXT
from gpufn_core.errors import GpufnError
from gpufn_gateway.audit.log import AuditLog
from gpufn_gateway.audit.refusals import Refused
from gpufn_gateway.auth.access import Access, Principal
from gpufn_gateway.http import request_id

Scope = MutableMapping[str, Any]

LOCAL: Final = "local"
REFUSALS: Final = frozenset({401, 403})
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DETAILS: Final = "gpufn.audit"
# Requests that make, end or feed calls. Replays of dead letters and runs of schedules are audited.
_CALLS: Final = frozenset(
    {
        "/v1/functions/{fn}/invocations/{id}",
        "/v1/functions/{fn}/maps/{id}/items/{first}",
        "/v1/invocations/{id}",
        "/v1/maps/{id}",
    }
)
_MODEL_CHANGES: Final = "/v2/repository/models/"
_RENEWALS: Final = "/v1/functions/{fn}/lease"  # a client sends one every few seconds


def is_audited(method: str, template: str) -> bool:
    """Return whether a request to the native route `template` is audited."""
    is_change = method not in _READING and template not in _CALLS and template != _RENEWALS
    return is_change and (not template.startswith("/v2") or template.startswith(_MODEL_CHANGES))


def add_details(scope: Scope, **details: object) -> None:
    """Add a request's changes to its record: short values without secrets."""
    present = {name: value for name, value in details.items() if value is not None and value is not msgspec.UNSET}
    scope.setdefault(_DETAILS, {}).update({name: str(value)[:LONGEST_TEXT] for name, value in present.items()})


def name_object(scope: Scope, parameter: str, name: str) -> None:
    """Replace a path parameter by the full name that it means: a short name means another function for another key, and
    later."""
    scope["path_params"][parameter] = name


class RequestAudit:
    def __init__(self, log: AuditLog, access: Access) -> None:
        self._log = log
        self._access = access

    def check_writable(self) -> None:
        self._log.check_writable()

    async def record(self, scope: Scope, template: str, status: int, code: str) -> None:
        """Append the record of an audited request that has ended."""
        principal: Principal | None = scope.get("gpufn.principal")  # an open path may have none
        id_ = "" if principal is None else principal.id or LOCAL
        path: Mapping[str, Any] = scope.get("path_params", {})
        await self._log.append(
            principal=id_,
            label=self._access.label_of(id_),
            address=_address(scope),
            request_id=request_id.current.get(),
            action=f"{scope['method']} {template}",
            object="/".join(map(str, path.values()))[:LONGEST_TEXT],
            status=status,
            code=code,
            details=scope.get(_DETAILS, {}),
        )

    def refuse(self, scope: Scope, template: str, status: int, code: str) -> None:
        """Record a refusal of any request, without waiting for it."""
        id_ = self._principal_of(scope)
        refused = Refused(
            id_, self._access.label_of(id_), _address(scope), f"{scope['method']} {template}", status, code
        )
        self._log.refuse(refused, request_id.current.get())

    def _principal_of(self, scope: Scope) -> str:
        """Return the principal of a refused request; calls are refused outside the routes, which know it."""
        principal: Principal | None = scope.get("gpufn.principal")
        if principal is None:
            try:
                principal = self._access.authenticate(dict(scope["headers"]))
            except GpufnError:
                return ""
        return principal.id or LOCAL


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""
