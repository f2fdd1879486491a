"""Forms with files, as clients of other platforms upload them."""

from __future__ import annotations

from typing import Any, NamedTuple

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from gpufn_core.errors import InvalidInput


class Upload(NamedTuple):
    name: str
    content_type: str
    data: bytes


class FormParts(NamedTuple):
    """The text fields and the files of a form, by the name of the part. A repeated name has several values."""

    fields: dict[str, list[str]]
    files: dict[str, list[Upload]]

    def file(self, name: str) -> Upload:
        """Return the one file of this name. Raises InvalidInput."""
        found = self.files.get(name, [])
        if len(found) != 1:
            raise InvalidInput(f"the form needs one file {name!r}", field=name)
        return found[0]

    def text(self, name: str, default: str = "") -> str:
        return self.fields.get(name, [default])[0]


async def form_parts(request: Request, body: bytes) -> FormParts:
    """Parse `body`, which was read from the request. Raises InvalidInput."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidInput("send the file as multipart/form-data")
    parts = FormParts({}, {})
    try:
        async with Request(request.scope, receive).form(max_part_size=len(body) + 1) as form:
            for name, value in form.multi_items():
                if isinstance(value, UploadFile):
                    content_type = value.content_type or "application/octet-stream"
                    upload = Upload(value.filename or name, content_type, await value.read())
                    parts.files.setdefault(name, []).append(upload)
                else:
                    parts.fields.setdefault(name, []).append(value)
    except HTTPException as error:
        raise InvalidInput(f"the form is not valid: {error.detail}") from None
    return parts
