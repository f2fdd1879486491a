"""Routes of teams: list, set, remove."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.team import Team, TeamLimits
from gpufn_core.errors import Conflict, InvalidInput, InvalidSpec
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.limits import LARGEST_INTEGER
from gpufn_core.protocol.records import KeyLimits
from gpufn_core.spec.isolation import LEAST
from gpufn_core.spec.naming import names, patterns
from gpufn_core.spec.resources import DOMAIN
from gpufn_gateway.audit.request_audit import add_details
from gpufn_gateway.auth import quotas
from gpufn_gateway.auth.scopes import ADMIN, READ
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.openapi.request_bodies import MAX_HELD, MAX_OWNED, MAX_WEIGHT, MIN_WEIGHT, NewTeam
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.requests import json_response, principal_of, read_json, route
from gpufn_gateway.teams.team_use import TeamUses
from gpufn_platform.bus.storage.key_value import KeyValue


class TeamRoutes:
    def __init__(self, teams: KeyValue, uses: TeamUses, registry: Registry, bodies: BodyReader) -> None:
        self._records = teams
        self._uses = uses
        self._registry = registry
        self._bodies = bodies

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/teams", self.index, READ, of_functions=True, scans=True),
            route("PUT", "/v1/teams/{team}", self.set, ADMIN),
            route("DELETE", "/v1/teams/{team}", self.remove, ADMIN),
        ]

    async def index(self, request: Request) -> Response:
        """List the teams, with their usage. A key with patterns sees the teams that own one of them."""
        principal = principal_of(request)
        teams = [team for team in self._registry.teams.all() if principal.is_within(READ, team.owns)]
        uses = await self._uses.of(teams)
        views = [msgspec.to_builtins(team) | {"use": uses[team.name]} for team in teams]
        return json_response({"teams": views})

    async def set(self, request: Request) -> Response:
        """Create a team, or replace all that is set of it. Raises InvalidInput; Conflict if it would own functions of
        another team, or functions with less isolation than it requires."""
        name = request.path_params["team"]
        try:
            names.check_group("team", name)
        except InvalidSpec as error:
            raise InvalidInput(error.message, field="team") from None
        body = await read_json(request, NewTeam, self._bodies)
        team = Team(
            name=name,
            owns=tuple(dict.fromkeys(body.owns)),
            weight=body.weight,
            limits=body.limits,
            isolation=body.isolation,
            callers=tuple(dict.fromkeys(body.callers)),
            trust_domains=tuple(dict.fromkeys(body.trust_domains)),
        )
        add_details(
            request.scope,
            owns=",".join(team.owns),
            weight=team.weight,
            isolation=team.isolation.value,
            callers=",".join(team.callers),
            trust_domains=",".join(team.trust_domains),
        )
        _check(team)
        if (conflict := self._registry.teams.conflict(team)) is not None:
            other, pattern = conflict
            raise Conflict(f"The team {other} owns {pattern}, which overlaps: a function belongs to one team.")
        if refused := self._refused(team):
            raise Conflict(
                f"These functions have less isolation than {team.isolation.value!r}: {', '.join(refused)}. Deploy them "
                f"with isolation={team.isolation.value!r} first."
            )
        await self._records.put(name, encode(team))
        return json_response(team)

    def _refused(self, team: Team) -> list[str]:
        """Return the functions that the team would own, but not accept."""
        active = self._registry.active_revisions()
        return sorted(each.function for each in active if team.has(each.function) and not team.accepts(each.spec))

    async def remove(self, request: Request) -> Response:
        """Remove a team. Its functions stay and belong to no team."""
        name = request.path_params["team"]
        if self._registry.teams.get(name) is None:
            raise RouteError(404, f"There is no team {name[:80]!r}: see `gpufn teams`.")
        await self._records.delete(name)
        return Response(status_code=204)


def _check(team: Team) -> None:
    """Raises InvalidInput."""
    if not 1 <= len(team.owns) <= MAX_OWNED:
        raise InvalidInput(f"a team owns 1 to {MAX_OWNED} patterns", field="owns")
    if len(team.callers) > MAX_OWNED:
        raise InvalidInput(f"a team has at most {MAX_OWNED} patterns of callers", field="callers")
    for field, pattern in [*(("owns", each) for each in team.owns), *(("callers", each) for each in team.callers)]:
        patterns.check_pattern(pattern, field)
    if len(team.trust_domains) > MAX_OWNED:
        raise InvalidInput(f"a team has at most {MAX_OWNED} trust domains", field="trust_domains")
    for domain in team.trust_domains:
        if DOMAIN.fullmatch(domain) is None:
            raise InvalidInput(f"{domain!r} is no trust domain: use a to z, 0 to 9 and hyphens", field="trust_domains")
    if team.isolation not in LEAST:
        raise InvalidInput(f"isolation must be one of {', '.join(LEAST)}", field="isolation")
    if not MIN_WEIGHT <= team.weight <= MAX_WEIGHT:
        raise InvalidInput(f"weight must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}", field="weight")
    _check_limits(team.limits)


def _check_limits(limits: TeamLimits) -> None:
    for name, value in (("workers", limits.workers), ("gpus", limits.gpus), ("functions", limits.functions)):
        if value is not None and not 0 <= value <= MAX_HELD:
            raise InvalidInput(f"{name} must be from 0 to {MAX_HELD:,}", field=f"limits.{name}")
    stored = limits.stored_bytes
    if stored is not None and not 0 <= stored <= LARGEST_INTEGER:
        raise InvalidInput(f"stored_bytes must be from 0 to {LARGEST_INTEGER:,}", field="limits.stored_bytes")
    quotas.check(KeyLimits(queued=limits.queued, run_s=limits.run_s, gpu_s=limits.gpu_s))
