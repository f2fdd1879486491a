"""Routes of volumes: list, show, upload, commit, download and delete.

The name of a volume has the form of a function's name, and the scopes of functions hold for it: `read` shows a volume
and its files, `deploy` changes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpufn_core.encoding import media
from gpufn_core.errors import GpufnError, InvalidInput
from gpufn_core.spec.naming import names
from gpufn_core.spec.volume_spec import VolumeChange
from gpufn_gateway.auth.scopes import DEPLOY, READ
from gpufn_gateway.http.body_reader import BodyReader, iter_body, require_content_length
from gpufn_gateway.openapi.request_bodies import FileDigests
from gpufn_gateway.routes.requests import (
    StreamedResponse,
    checked_digest,
    digest_in,
    headers_of,
    json_response,
    principal_of,
    read_json,
    route,
    whole_number,
)
from gpufn_gateway.volumes.volumes import Volumes, no_such_volume

_ALL = "/v1/volumes"
_ONE = f"{_ALL}/{{volume:name}}"
_LONGEST_VERSION = 12  # digits


class VolumeRoutes:
    """Volume routes. `file_limit_bytes` is the largest file."""

    def __init__(self, volumes: Volumes, bodies: BodyReader, file_limit_bytes: int) -> None:
        self._volumes = volumes
        self._bodies = bodies
        self._file_limit_bytes = file_limit_bytes

    def routes(self) -> list[Route]:
        return [
            route("GET", _ALL, self.index, READ, of_functions=True, scans=True),
            route("GET", f"{_ONE}/tree", self.tree, READ, of_functions=True, scans=True),
            route("GET", f"{_ONE}/blobs/{{digest}}", self.get_file, READ, of_functions=True),
            route("PUT", f"{_ONE}/blobs/{{digest}}", self.put_file, DEPLOY, of_functions=True),
            route("POST", f"{_ONE}/missing", self.missing, DEPLOY, of_functions=True),
            route("POST", f"{_ONE}/commits", self.commit, DEPLOY, of_functions=True),
            route("GET", _ONE, self.show, READ, of_functions=True),
            route("DELETE", _ONE, self.remove, DEPLOY, of_functions=True),
        ]

    async def index(self, request: Request) -> Response:
        principal = principal_of(request)
        return json_response({"volumes": [each for each in self._volumes.all() if principal.may_read(each.name)]})

    async def show(self, request: Request) -> Response:
        return json_response(await self._volumes.read(_named(request, READ)))

    async def tree(self, request: Request) -> Response:
        """List the files of a version (`?version=3`), by default of the newest."""
        name = _named(request, READ)
        text = request.query_params.get("version")
        version = None if text is None else whole_number(text, _LONGEST_VERSION)
        if text is not None and version is None:
            raise InvalidInput(f"version must be a number, not {text[:40]!r}", field="version")
        return json_response(await self._volumes.tree(name, version))

    async def get_file(self, request: Request) -> ASGIApp:
        name = _named(request, READ)
        size, chunks = await self._volumes.open_file(name, digest_in(request, "a file"))
        headers = [(b"content-type", media.BYTES.encode()), (b"content-length", b"%d" % size)]
        return StreamedResponse(headers, chunks)

    async def missing(self, request: Request) -> Response:
        """Return which of some files have to be uploaded before a commit names them."""
        _named(request, DEPLOY)
        body = await read_json(request, FileDigests, self._bodies)
        for digest in body.digests:
            checked_digest(digest, "a file")
        return json_response({"missing": await self._volumes.missing(body.digests)})

    async def put_file(self, request: Request) -> Response:
        _named(request, DEPLOY)
        digest = digest_in(request, "a file")
        size = require_content_length(headers_of(request), self._file_limit_bytes, "a volume's file")
        async with contextlib.aclosing(iter_body(request.receive)) as parts:
            await self._volumes.put_file(digest, size, parts)
        return json_response({"digest": digest, "size": size}, 201)

    async def commit(self, request: Request) -> Response:
        name = _named(request, DEPLOY)
        change = await read_json(request, VolumeChange, self._bodies)
        return json_response(await self._volumes.commit(name, change), 201)

    async def remove(self, request: Request) -> Response:
        await self._volumes.remove(_named(request, DEPLOY))
        return Response(status_code=204)


def _named(request: Request, verb: str) -> str:
    """Return the full name in the path. Raises InvalidInput, DataNotFound, Forbidden."""
    return full_name_in(request, "volume", verb, no_such_volume)


def full_name_in(request: Request, parameter: str, verb: str, missing: Callable[[str], GpufnError]) -> str:
    """Return the full name in a path, with `default` for the parts that it leaves out. Raises `missing` of the name if
    it does not exist for the principal, Forbidden without `verb`, and InvalidInput."""
    written = str(request.path_params[parameter])
    name = names.canonical(written)
    if not names.is_function_name(name):
        raise InvalidInput(
            f"{written[:130]!r} is not a name: use a to z, 0 to 9 and hyphens, at most 40 characters, or env/app/name",
            field=parameter,
        )
    principal = principal_of(request)
    principal.require_visible(name, missing(name))
    principal.require_on(verb, name)
    return name
