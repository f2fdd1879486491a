"""Replicate's paths, at `/replicate/v1`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpufn_core.errors import FunctionNotFound, InvalidInput, RevisionNotFound
from gpufn_gateway.auth.scopes import READ
from gpufn_gateway.functions.target import Target
from gpufn_gateway.http.responses import GPUFN_FORMAT
from gpufn_gateway.http.sse import EVENT_HEADERS, Events
from gpufn_gateway.openapi.request_bounds import MAX_LISTED
from gpufn_gateway.protocols.adapter import Adapter
from gpufn_gateway.protocols.captured import Outcome
from gpufn_gateway.protocols.replicate import files, models, predictions
from gpufn_gateway.protocols.replicate.predictions import FORM, PREFIX
from gpufn_gateway.routes.requests import StreamedResponse, json_response, principal_of, route

_MODEL: Final = f"{PREFIX}/models/{{owner}}/{{name}}"
_PREDICTION: Final = f"{PREFIX}/predictions/{{id}}"
_FILE: Final = f"{PREFIX}/files/{{id}}"
_POLL_S: Final = 60.0


class Replicate(Adapter):
    """Errors are problem details, as in the gpufn API."""

    errors = GPUFN_FORMAT
    audited = frozenset({f"{PREFIX}/files", _FILE})  # uploads
    webhooks: ClassVar = {FORM: predictions.webhook_payload}

    def owns(self, path: str) -> bool:
        return path.startswith(f"{PREFIX}/")

    def routes(self) -> list[Route]:
        return [
            route("POST", f"{PREFIX}/predictions", self.create),
            route("GET", f"{PREFIX}/predictions", self.predictions, READ, of_functions=True, scans=True),
            route("GET", _PREDICTION, self.show),
            route("GET", f"{_PREDICTION}/stream", self.stream),
            route("POST", f"{_PREDICTION}/cancel", self.cancel),
            route("GET", f"{PREFIX}/models", self.models, scans=True),
            route("GET", _MODEL, self.model),
            route("POST", f"{_MODEL}/predictions", self.create_of_model),
            route("GET", f"{_MODEL}/versions", self.versions),
            route("GET", f"{_MODEL}/versions/{{version}}", self.version),
            route("POST", f"{PREFIX}/deployments/{{owner}}/{{name}}/predictions", self.create_of_model),
            route("POST", f"{PREFIX}/files", self.add_file),
            route("GET", f"{PREFIX}/files", self.files, scans=True),
            route("GET", _FILE, self.file),
            route("DELETE", _FILE, self.remove_file),
            route("GET", f"{PREFIX}/webhooks/default/secret", self.webhook_secret),
            route("GET", f"{PREFIX}/account", self.account),
        ]

    # --- predictions -------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        new = predictions.new_prediction(await self.platform.body(request))
        return await self._create(self._target_of_version(new.version, request), new, request)

    async def create_of_model(self, request: Request) -> Response:
        new = predictions.new_prediction(await self.platform.body(request))
        return await self._create(self._model(request), new, request)

    async def _create(self, target: Target, new: predictions.NewPrediction, request: Request) -> Response:
        owner, properties = principal_of(request).owner, target.method.parameters.get("properties", {})
        limit = self.platform.max_argument_bytes
        arguments = await files.InputFiles(self.platform.files, owner, properties, limit).resolve(new.input)
        record = await self.platform.submit(target.path, msgspec.json.encode(arguments), request, new.options())
        wait_s = predictions.wait_s(request.headers.get("prefer", ""))
        view, outcome = await self.platform.result(record.id, request, wait_s)
        prediction = predictions.prediction(view, outcome, base=_base(request), given=new.input)
        if wait_s and not view["state"].ended:
            prediction["status"] = "starting"  # the client takes any other status as the end of its wait
        return json_response(prediction, 201)

    async def show(self, request: Request) -> Response:
        return await self._show(_id(request), request)

    async def cancel(self, request: Request) -> Response:
        record = await self.platform.cancel(_id(request), request)
        return await self._show(record.id, request)

    async def _show(self, invocation: str, request: Request) -> Response:
        view, outcome = await self.platform.result(invocation, request)
        return json_response(predictions.prediction(view, outcome, base=_base(request)))

    async def predictions(self, request: Request) -> Response:
        """List the newest predictions, without their input and output."""
        views = await self.platform.recent(request, MAX_LISTED)
        return json_response(models.page([predictions.prediction(view, base=_base(request)) for view in views]))

    async def stream(self, request: Request) -> ASGIApp:
        view = await self.platform.status(_id(request), request)
        return StreamedResponse(EVENT_HEADERS, self._events(view["id"], request), Events.heartbeat)

    async def _events(self, invocation: str, request: Request) -> AsyncIterator[bytes]:
        """Yield the items of a generator as they come, if this gateway follows them; then the rest, and the end."""
        live, sent = self.platform.live, 0
        ended = asyncio.ensure_future(self._ended(invocation, request))
        more: asyncio.Future[None] | None = None
        try:
            while not ended.done():
                more = asyncio.ensure_future(live.wait(invocation, sent))
                await asyncio.wait({ended, more}, return_when=asyncio.FIRST_COMPLETED)
                more.cancel()
                for item in live.after(invocation, sent):
                    yield predictions.item_event(sent, item.content_type, item.body)
                    sent += 1
            view, outcome = await ended
            live.forget(invocation)
            yield predictions.events(view, outcome, streams=self._streams(view["function"], request), sent=sent)
        finally:
            for task in (ended, more):
                if task is not None:
                    task.cancel()

    async def _ended(self, invocation: str, request: Request) -> tuple[dict[str, Any], Outcome | None]:
        while True:
            view, outcome = await self.platform.result(invocation, request, _POLL_S)
            if view["state"].ended:
                return view, outcome

    def _streams(self, function: str, request: Request) -> bool:
        try:
            return self.platform.resolve(function, request).method.kind.streams
        except FunctionNotFound:  # it was deleted meanwhile
            return False

    # --- models ------------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        return json_response(models.page([_model(target, request) for target in self.platform.functions(request)]))

    async def model(self, request: Request) -> Response:
        return json_response(_model(self._model(request), request))

    async def versions(self, request: Request) -> Response:
        return json_response(models.page(self._versions(self._model(request))))

    async def version(self, request: Request) -> Response:
        target, wanted = self._model(request), request.path_params["version"]
        found = next((each for each in self._versions(target) if each["id"] == wanted), None)
        if found is None:
            raise RevisionNotFound(f"{'/'.join(models.model_of(target.path))} has no version {wanted[:100]!r}.")
        return json_response(found)

    def _versions(self, target: Target) -> list[dict[str, Any]]:
        """Return the versions of a model that have its method, the newest first."""
        name = target.method.name
        revisions = self.platform.revisions(target)
        methods = ((each, each.spec.method(name)) for each in revisions)
        return [models.version(target.path, method, each) for each, method in methods if method is not None]

    def _model(self, request: Request) -> Target:
        return self.platform.resolve(models.function_of(*_owner_and_name(request)), request)

    def _target_of_version(self, version: str | None, request: Request) -> Target:
        """Return the function of a version: its id, `owner/name:id` or `owner/name`. Raises InvalidInput, also for a
        version that does not serve."""
        if version is None:
            raise InvalidInput("version: missing", field="version")
        model, colon, id_ = version.rpartition(":") if ":" in version else ("", "", version)
        unknown = InvalidInput(f"There is no version {version[:200]!r} that this API key may call.", field="version")
        parsed = models.parse_version(id_)
        if parsed is None and (colon or version.count("/") != 1):
            raise unknown
        name = models.function_of(*version.split("/")) if parsed is None else parsed.function
        try:
            target = self.platform.resolve(name, request)
        except FunctionNotFound:
            raise unknown from None
        if model and model != "/".join(models.model_of(target.path)):
            raise unknown
        if parsed is not None and parsed.number != target.number:
            serving = models.version_id(target.path, target.number)
            raise InvalidInput(f"{version[:200]!r} does not receive calls; {serving} does", field="version")
        return target

    # --- files -------------------------------------------------------------------------------------------------------

    async def add_file(self, request: Request) -> Response:
        upload = (await self.platform.form(request)).file("content")
        owner = principal_of(request).owner
        file = await self.platform.files.create(owner, upload.name, upload.content_type, upload.data)
        return json_response(files.view(file, _base(request)), 201)

    async def files(self, request: Request) -> Response:
        stored = await self.platform.files.all(principal_of(request).owner)
        return json_response(models.page([files.view(file, _base(request)) for file in stored]))

    async def file(self, request: Request) -> Response:
        file = await self.platform.files.find(principal_of(request).owner, _id(request))
        return json_response(files.view(file, _base(request)))

    async def remove_file(self, request: Request) -> Response:
        file = await self.platform.files.find(principal_of(request).owner, _id(request))
        await self.platform.files.remove(file)
        return Response(status_code=204)

    # --- account -----------------------------------------------------------------------------------------------------

    async def webhook_secret(self, request: Request) -> Response:
        return json_response({"key": await self.platform.webhook_secret(request)})

    async def account(self, request: Request) -> Response:
        name = principal_of(request).owner
        return json_response({"type": "user", "username": name, "name": name, "github_url": None})


def _model(target: Target, request: Request) -> dict[str, Any]:
    url = f"{_base(request)}{PREFIX}/models/{'/'.join(models.model_of(target.path))}"
    return models.model(target.path, target.method, target.revision, url)


def _base(request: Request) -> str:
    """Return the URL of the gateway as the client has it."""
    return str(request.base_url).rstrip("/")


def _owner_and_name(request: Request) -> tuple[str, str]:
    return request.path_params["owner"], request.path_params["name"]


def _id(request: Request) -> str:
    return str(request.path_params["id"]).lower()
