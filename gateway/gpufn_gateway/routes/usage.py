"""What calls took, per function, API key and day."""

from __future__ import annotations

import itertools
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.metering import Usage, UsageKey, day_of, days
from gpufn_core.errors import InvalidInput
from gpufn_gateway.auth.access import READ
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.routes.invocations import deployed_name
from gpufn_gateway.routes.requests import json_answer, principal_of
from gpufn_platform.bus.storage.key_value import KeyValue
from gpufn_platform.process.clock import Clock

_SHOWN_DAYS: Final = 7
_MOST_DAYS: Final = 366
_DAY_S: Final = 86_400.0

_usage = msgspec.msgpack.Decoder(Usage)


class UsageRoutes:
    def __init__(self, records: KeyValue, registry: Registry, clock: Clock) -> None:
        self._records = records
        self._registry = registry
        self._clock = clock

    def routes(self) -> list[Route]:
        return [Route("/v1/usage", self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        principal_of(request).need(READ)
        asked, key = request.query_params.get("function"), request.query_params.get("key")
        function = None if asked is None else deployed_name(asked)
        found: dict[UsageKey, Usage] = {}
        for day in self._days(request):
            for entry in await self._records.entries(f"{day}."):
                which = UsageKey.of_record(entry.key)
                if function in (None, which.function) and key in (None, which.key):
                    found[which] = found.get(which, Usage()) + _usage.decode(entry.value)
        if function is not None and not found:
            self._registry.function(function)  # raises FunctionNotFound; a deleted one's usage was found
        rows = [{**which._asdict(), "usage": found[which]} for which in sorted(found)]
        return json_answer({"usage": rows})

    def _days(self, request: Request) -> list[str]:
        now = self._clock.time()
        until = request.query_params.get("until", day_of(now))
        since = request.query_params.get("since", day_of(now - (_SHOWN_DAYS - 1) * _DAY_S))
        try:
            wanted = list(itertools.islice(days(since, until), _MOST_DAYS + 1))
        except ValueError:
            raise InvalidInput("since and until are days, as 2026-11-21", field="since") from None
        if len(wanted) > _MOST_DAYS:
            raise InvalidInput(f"since and until are at most {_MOST_DAYS} days apart", field="since")
        return wanted
