"""Whether a key may do more than invoke."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gpufn.client.call_api import CallApi

_READS: Final = frozenset({"admin", "deploy", "read"})


def may_read(client: CallApi) -> bool:
    """Return whether the client may read some functions. Ask before a request that only helps the user: the audit log
    records each refusal."""
    return not client.has_credential or any(scope.partition(":")[0] in _READS for scope in client.whoami().scopes)
