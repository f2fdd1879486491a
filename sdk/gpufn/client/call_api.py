"""The part of the HTTP API that `.remote` and related methods need: functions, calls and maps."""

from __future__ import annotations

from gpufn.client.http_calls import CallRequests
from gpufn.client.http_functions import FunctionRequests
from gpufn.client.http_maps import MapRequests


class CallApi(FunctionRequests, CallRequests, MapRequests):
    """Function, call and map endpoints of one gateway."""
