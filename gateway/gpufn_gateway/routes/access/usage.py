"""Route of usage: calls, run time and GPU seconds per function, API key and day."""

from __future__ import annotations

import itertools
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.usage import Usage, UsageKey, day_of, days
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.naming.variant_names import function_of
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.routes.requests import json_response, principal_of, route
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import Clock

_DEFAULT_DAYS: Final = 7
_MAX_DAYS: Final = 366
_DAY_S: Final = 86_400.0

_usage = msgspec.msgpack.Decoder(Usage)


class UsageRoutes:
    def __init__(self, records: KeyValue, registry: Registry, clock: Clock) -> None:
        self._records = records
        self._registry = registry
        self._clock = clock

    def routes(self) -> list[Route]:
        return [route("GET", "/v1/usage", self.show, READ, of_functions=True, scans=True)]

    async def show(self, request: Request) -> Response:
        requested, key = request.query_params.get("function"), request.query_params.get("key")
        principal = principal_of(request)
        function = None if requested is None else self._registry.find_or_deleted(requested, principal)
        if function is not None:
            principal.require_on(READ, function)
        usage_by_key: dict[UsageKey, Usage] = {}
        for day in requested_days(request, self._clock):
            for entry in await self._records.entries(f"{day}."):
                usage_key = UsageKey.of_record(entry.key)
                functions = (None, usage_key.function, function_of(usage_key.function))  # a variant is its function's
                is_requested = function in functions and key in (None, usage_key.key)
                if is_requested and principal.may_read(usage_key.function):
                    usage_by_key[usage_key] = usage_by_key.get(usage_key, Usage()) + _usage.decode(entry.value)
        if function is not None and not usage_by_key:
            self._registry.function(function)  # raises FunctionNotFound, unless a deleted function has usage
        rows = [{**msgspec.structs.asdict(each), "usage": usage_by_key[each]} for each in sorted(usage_by_key)]
        return json_response({"usage": rows})


def requested_days(request: Request, clock: Clock) -> list[str]:
    """Return the days from `since` to `until`, by default the last seven. Raises InvalidInput."""
    now = clock.time()
    until = request.query_params.get("until", day_of(now))
    since = request.query_params.get("since", day_of(now - (_DEFAULT_DAYS - 1) * _DAY_S))
    try:
        wanted = list(itertools.islice(days(since, until), _MAX_DAYS + 1))
    except ValueError:
        raise InvalidInput("since and until must be days, such as 2026-11-21", field="since") from None
    if len(wanted) > _MAX_DAYS:
        raise InvalidInput(f"since and until may be at most {_MAX_DAYS} days apart", field="since")
    return wanted
