"""The sender of the request that this task serves: a team, or a key or a user without one (`Access.sender_of`)."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

current: Final[ContextVar[str]] = ContextVar("sender", default="")
