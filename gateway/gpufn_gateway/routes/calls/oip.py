"""Routes of the Open Inference Protocol V2: server, models and health. Inference is `gpufn_gateway.oip.inference`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import gpufn
from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.domain.revision import Revision, RevisionState
from gpufn_core.errors import CapacityError, FunctionNotFound, GpufnError, InvalidInput
from gpufn_core.spec.function_spec import Packaging
from gpufn_gateway.auth.access import Principal
from gpufn_gateway.auth.scopes import DEPLOY
from gpufn_gateway.calls import admission
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.registry import Registry
from gpufn_gateway.functions.target import Target
from gpufn_gateway.http.body_reader import BodyReader
from gpufn_gateway.metrics.telemetry import Telemetry
from gpufn_gateway.oip import views
from gpufn_gateway.oip.inference import ModelNotReady, check_is_model, is_model, model_error
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.requests import json_response, principal_of, read_json, route

_LOAD_TIMEOUT_S: Final = 55.0  # below the 60 s timeout of tritonclient
_LOAD_POLL_S: Final = 0.05
_NO_EFFECT: Final = frozenset({"unload_dependents"})  # parameters: no model depends on another
# Triton extensions that its clients call.
_UNSUPPORTED = (
    "/v2/logging",
    "/v2/trace/{rest:path}",
    "/v2/cudasharedmemory/{rest:path}",
    "/v2/tpusharedmemory/{rest:path}",
    "/v2/models/{model:name}/trace/setting",
    "/v2/models/{model:name}/generate",
    "/v2/models/{model:name}/generate_stream",
    "/v2/models/{model:name}/versions/{version}/generate",
    "/v2/models/{model:name}/versions/{version}/generate_stream",
)
_EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
_SHARED_MEMORY: Final = "system_shared_memory"


class _Change(msgspec.Struct):
    """The body of load and unload."""

    parameters: dict[str, Any] = {}


class OipRoutes:
    """Routes of the protocol. `why_not_ready` returns the reason why calls cannot be served yet, or None.
    `shares_memory`: clients may register shared memory."""

    def __init__(
        self,
        registry: Registry,
        counters: Telemetry,
        why_not_ready: Callable[[], str | None],
        *,
        deploys: Deploys,
        bodies: BodyReader,
        shares_memory: bool = False,
    ) -> None:
        self._registry = registry
        self._telemetry = counters
        self._why_not_ready = why_not_ready
        self._deploys = deploys
        self._bodies = bodies
        self._extensions = (*_EXTENSIONS, _SHARED_MEMORY) if shares_memory else _EXTENSIONS

    def routes(self) -> list[Route]:
        routes = [
            route("GET", "/v2", self.server),
            route("GET", "/v2/health/live", self.live),
            route("GET", "/v2/health/ready", self.ready),
            route("GET", "/v2/models/stats", self.all_statistics, scans=True),
            route("POST", "/v2/repository/index", self.index, scans=True),
            route("POST", "/v2/repository/models/{model:name}/load", self.load, DEPLOY, of_functions=True),
            route("POST", "/v2/repository/models/{model:name}/unload", self.unload, DEPLOY, of_functions=True),
        ]
        for one in ("/v2/models/{model:name}", "/v2/models/{model:name}/versions/{version}"):
            routes += [
                route("GET", one, self.metadata),
                route("GET", f"{one}/ready", self.model_ready),
                route("GET", f"{one}/config", self.config),
                route("GET", f"{one}/stats", self.statistics),
            ]
        return routes + [Route(path, self.unsupported, methods=["GET", "POST"]) for path in _UNSUPPORTED]

    async def server(self, request: Request) -> Response:
        return json_response({"name": "gpufn", "version": gpufn.__version__, "extensions": self._extensions})

    async def live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        reason = self._why_not_ready()
        if reason is not None:
            raise CapacityError(f"Not ready: {reason}.")
        return json_response({"ready": True})

    async def metadata(self, request: Request) -> Response:
        target = self._target(request)
        if not _is_file(target.revision):
            return json_response(views.function_metadata(target.revision, target.path, target.method))
        return json_response(views.metadata(target.revision, self._manifest(target.revision)))

    async def config(self, request: Request) -> Response:
        target = self._target(request)
        if not _is_file(target.revision):
            return json_response(views.function_config(target.revision, target.path, target.method))
        return json_response(views.config(target.revision, self._manifest(target.revision)))

    async def model_ready(self, request: Request) -> Response:
        target = self._target(request)
        if (refusal := self._refusal(target, principal_of(request))) is not None:
            raise refusal
        return json_response({"name": target.name, "ready": True})

    async def statistics(self, request: Request) -> Response:
        return json_response({"model_stats": [self._statistics(self._target(request))]})

    async def all_statistics(self, request: Request) -> Response:
        targets = self._visible(principal_of(request))
        return json_response({"model_stats": [self._statistics(target) for target in targets]})

    async def index(self, request: Request) -> Response:
        """List the serving models and the models being built that the client may see."""
        principal = principal_of(request)
        models: list[dict[str, Any]] = []
        for target in self._visible(principal):
            refusal = self._refusal(target, principal)
            state = {"state": "READY", "reason": ""}
            if refusal is not None:
                state = {"state": "UNAVAILABLE", "reason": refusal.message}
            models.append({"name": target.path, "version": str(target.number), **state})
        for name in sorted(self._registry.revisions):
            for number in self._registry.numbers(name):
                revision = self._registry.revisions[name][number]
                if _is_file(revision) and revision.state is RevisionState.BUILDING and _may_see(principal, name):
                    state = {"state": "LOADING", "reason": "its engines are being built"}
                    models.append({"name": name, "version": str(number), **state})
        return json_response(models)

    async def load(self, request: Request) -> Response:
        """Set a minimum of one worker, and wait until a worker is ready. Raises ModelNotReady."""
        target = await self._changed_target(request)
        least = max(1, target.revision.spec.scaling.min_workers, target.function.min_workers or 0)
        function = await self._deploys.scale(target.name, least, msgspec.UNSET)
        for _ in range(int(_LOAD_TIMEOUT_S / _LOAD_POLL_S)):
            if self._registry.ready_workers(function):
                return json_response({})
            await asyncio.sleep(_LOAD_POLL_S)
        raise ModelNotReady(
            f"{target.path} has no worker after {_LOAD_TIMEOUT_S:g} s; `gpufn why {target.name}` shows the reason."
        )

    async def unload(self, request: Request) -> Response:
        """Set a minimum of no workers: they end when they are idle. The next call starts one."""
        target = await self._changed_target(request)
        await self._deploys.scale(target.name, 0, msgspec.UNSET)
        return json_response({})

    async def _changed_target(self, request: Request) -> Target:
        """Return the model to load or unload. Raises Forbidden, and InvalidInput for parameters with an effect, such as
        another configuration."""
        parameters = (await read_json(request, _Change, self._bodies)).parameters
        if unknown := parameters.keys() - _NO_EFFECT:
            raise InvalidInput(f"the parameter {min(unknown)[:100]!r} is not supported", field="parameters")
        target = self._target(request)
        principal_of(request).require_on(DEPLOY, target.name)
        return target

    async def unsupported(self, request: Request) -> Response:
        extension = request.url.path.split("/")[-1 if "model" in request.path_params else 2]
        raise RouteError(501, f"gpufn does not support the extension {extension!r} of the Open Inference Protocol.")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _target(self, request: Request) -> Target:
        """Resolve the model in the path. Raises FunctionNotFound, RevisionNotFound, ModelNotReady, Forbidden."""
        name = request.path_params["model"]
        principal = principal_of(request)
        try:
            target = self._registry.resolve(name, principal)
        except FunctionNotFound as error:
            raise model_error(error, name, self._registry, principal) from None
        if not principal.may_read(target.name):
            principal.require_invoke(target.name)
        version = request.path_params.get("version", "")
        target = target.of("", revision=version or str(target.number))
        check_is_model(target, version)
        return target

    def _manifest(self, revision: Revision) -> EngineManifest:
        manifest = self._registry.manifest(revision, revision.spec.models[0])
        if manifest is None:
            raise ModelNotReady(f"The engines of {revision} are not known to this gateway yet; retry.")
        return manifest

    def _visible(self, principal: Principal) -> Iterator[Target]:
        for name in sorted(self._registry.functions):
            if not _may_see(principal, name):
                continue
            revision = self._registry.revisions.get(name, {}).get(self._registry.functions[name].serving)
            if revision is not None:
                spec = revision.spec
                yield from (self._registry.target(name, each.name) for each in spec.methods if is_model(spec, each))

    def _refusal(self, target: Target, principal: Principal) -> GpufnError | None:
        status = self._registry.status_for(principal, target.name)
        return admission.refusal(target.function, target.revision, status)

    def _statistics(self, target: Target) -> dict[str, Any]:
        return views.statistics(target.revision, target.path, self._telemetry.of(target.name))


def _is_file(revision: Revision) -> bool:
    """Return whether a revision is a model without code, which has engines."""
    return revision.spec.entry.packaging is Packaging.MODEL


def _may_see(principal: Principal, function: str) -> bool:
    return principal.may_read(function) or principal.may_invoke(function)
