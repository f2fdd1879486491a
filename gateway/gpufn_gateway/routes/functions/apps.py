"""Routes of apps: list them, and roll one back."""

from __future__ import annotations

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.domain.revision import Function
from gpufn_core.errors import FunctionNotFound, RevisionNotFound
from gpufn_core.spec.naming.names import Home, home_of, shown
from gpufn_core.spec.naming.variant_names import is_variant
from gpufn_gateway.auth.scopes import DEPLOY, READ
from gpufn_gateway.functions import apps
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.secret_use import check_secret_use
from gpufn_gateway.routes.requests import json_response, principal_of, route


class AppRoutes:
    def __init__(self, registry: Registry, deploys: Deploys) -> None:
        self._registry = registry
        self._deploys = deploys

    def routes(self) -> list[Route]:
        return [
            route("GET", "/v1/apps", self.index, READ, of_functions=True, scans=True),
            route("POST", "/v1/apps/{env}/{app}/rollback", self.rollback, DEPLOY, of_functions=True),
        ]

    async def index(self, request: Request) -> Response:
        principal = principal_of(request)
        functions = [each for each in self._functions() if principal.may_read(each.name)]
        return json_response({"apps": apps.views(functions, self._registry.revisions)})

    async def rollback(self, request: Request) -> Response:
        """Undo the newest deploy of an app: each function that it changed goes back to the revision before it.

        Raises FunctionNotFound for an unknown app, and RevisionNotFound if no function has an earlier revision. Raises
        Forbidden if the client may not deploy all functions of the app that it may see, or use the secrets of their
        revisions. Raises UntrustedDeploy.
        """
        home = Home(request.path_params["env"], request.path_params["app"])
        principal = principal_of(request)
        functions = [each for each in self._functions() if home_of(each.name) == home and principal.may_see(each.name)]
        if not functions:
            raise FunctionNotFound(f"There is no app {shown('/'.join(home))}: see `gpufn apps`.")
        for each in functions:
            principal.require_on(DEPLOY, each.name)
        earlier = apps.earlier_revisions(functions, self._registry.revisions)
        if not earlier:
            raise RevisionNotFound(f"No function of the app {'/'.join(home)} has an earlier revision.")
        for name, number in earlier:  # before the first change, so that none returns alone
            revision = self._registry.revision(name, number)
            self._deploys.checks.check_earlier(revision)
            check_secret_use(principal, self._registry, revision)
        changed = [await self._deploys.rollback(name, number) for name, number in earlier]
        return json_response(
            {"functions": [{"name": each.name, "active": each.active, "serving": each.serving} for each in changed]}
        )

    def _functions(self) -> Iterator[Function]:
        """Yield the functions, without variants: these follow their function."""
        return (each for each in self._registry.functions.values() if not is_variant(each.name))
