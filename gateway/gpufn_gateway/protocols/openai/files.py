"""Files: uploads, for batches."""

from __future__ import annotations

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.records import ClientFile
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.responses import USER_CONTENT
from gpufn_gateway.protocols.platform import Platform
from gpufn_gateway.routes.requests import json_response, principal_of, route

PREFIX: Final = "file-"  # prefix of ids
_PURPOSES: Final = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")


def view(file: ClientFile) -> dict[str, Any]:
    return {
        "id": f"{PREFIX}{file.id}",
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created_at),
        "expires_at": int(file.expires_at),
        "filename": file.name,
        "purpose": file.purpose or "user_data",
        "status": "processed",
    }


class FileRoutes:
    def __init__(self, platform: Platform, prefix: str) -> None:
        self._platform = platform
        self.paths = (f"{prefix}/files", f"{prefix}/files/{{id}}")

    def routes(self) -> list[Route]:
        every, one = self.paths
        return [
            route("POST", every, self.create),
            route("GET", every, self.all, scans=True),
            route("GET", one, self.show),
            route("DELETE", one, self.remove),
            route("GET", f"{one}/content", self.content),
        ]

    async def create(self, request: Request) -> Response:
        form = await self._platform.form(request)
        upload, purpose = form.file("file"), form.text("purpose")
        if purpose not in _PURPOSES:
            raise InvalidInput(f"purpose must be one of {', '.join(_PURPOSES)}", field="purpose")
        owner = principal_of(request).owner
        file = await self._platform.files.create(owner, upload.name, upload.content_type, upload.data, purpose=purpose)
        return json_response(view(file))

    async def all(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        stored = await self._platform.files.all(principal_of(request).owner)
        data = [view(file) for file in stored if purpose is None or file.purpose == purpose]
        return json_response({"object": "list", "data": data, "has_more": False})

    async def show(self, request: Request) -> Response:
        return json_response(view(await self.find(request.path_params["id"], request)))

    async def content(self, request: Request) -> Response:
        file = await self.find(request.path_params["id"], request)
        headers = {name.decode(): value.decode() for name, value in USER_CONTENT}
        data = await self._platform.files.read(file)
        return Response(data, headers=headers, media_type=negotiation.clean(file.content_type))

    async def remove(self, request: Request) -> Response:
        file = await self.find(request.path_params["id"], request)
        await self._platform.files.remove(file)
        return json_response({"id": f"{PREFIX}{file.id}", "object": "file", "deleted": True})

    async def find(self, id_: str, request: Request) -> ClientFile:
        """Return a file by its id in OpenAI's form. Raises RouteError 404."""
        return await self._platform.files.find(principal_of(request).owner, id_.removeprefix(PREFIX))
