"""A web function, and the sender of a request to it."""

from __future__ import annotations

from typing import NamedTuple

from gpufn_core.spec.web_spec import WebSpec
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.functions.target import Target
from gpufn_gateway.web.address import Address


class Match(NamedTuple):
    address: Address
    target: Target
    web: WebSpec
    principal: Principal
