"""The part of the HTTP API that `.remote` and related methods need: functions, calls and maps."""

from __future__ import annotations

from gpufn.client.endpoints.calls import CallRequests
from gpufn.client.endpoints.functions import FunctionRequests
from gpufn.client.endpoints.maps import MapRequests


class CallApi(FunctionRequests, CallRequests, MapRequests):
    """Function, call and map endpoints of one gateway."""
