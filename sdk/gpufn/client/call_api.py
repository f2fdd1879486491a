"""The part of the HTTP API that `.remote` and related methods need: functions, calls and maps."""

from __future__ import annotations

from gpufn.client.endpoints.calls import CallRequests
from gpufn.client.endpoints.functions import FunctionRequests
from gpufn.client.endpoints.maps import MapRequests
from gpufn.client.views.access import PrincipalView


class CallApi(FunctionRequests, CallRequests, MapRequests):
    """Function, call and map endpoints of one gateway."""

    def whoami(self) -> PrincipalView:
        """Return the principal of this client's requests."""
        return self._json(PrincipalView, "GET", "/v1/auth/me")
