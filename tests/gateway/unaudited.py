"""A gateway without a bus has no audit log."""

from __future__ import annotations

from typing import Any

from gpufn_gateway.audit.request_audit import RequestAudit


class Unaudited(RequestAudit):
    """`refused` has the routes and statuses of refused requests."""

    def __init__(self) -> None:
        self.refused: list[tuple[str, int]] = []

    def check_writable(self) -> None: ...

    async def record(self, scope: Any, template: str, status: int, code: str) -> None: ...

    def refuse(self, scope: Any, template: str, status: int, code: str) -> None:
        self.refused.append((template, status))
