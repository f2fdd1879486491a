"""The part of the HTTP interface that `.remote` and its siblings need: functions, calls and maps."""

from __future__ import annotations

from gpufn.client.http_calls import CallRequests
from gpufn.client.http_functions import FunctionRequests
from gpufn.client.http_maps import MapRequests


class CallApi(FunctionRequests, CallRequests, MapRequests):
    """The endpoints of functions, calls and maps of one gateway."""
