"""Problem responses (docs/http.md)."""

from __future__ import annotations

from gpufn_core.errors import ErrorInfo


class Problem(ErrorInfo, frozen=True, rename={"message": "detail"}):
    """An RFC 9457 problem with gpufn's extension members."""

    code: str = ""
    message: str = ""
    title: str = ""
