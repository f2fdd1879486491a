"""Forms with files, as clients of other platforms upload them. Pure."""

from __future__ import annotations

from typing import NamedTuple

from gpufn_core.errors import InvalidInput
from gpufn_gateway.arguments.form import Form

_BYTES = "application/octet-stream"


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


def form_parts(content_type: str, body: bytes) -> FormParts:
    """Parse the body of a form. Raises InvalidInput."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise InvalidInput("send the file as multipart/form-data")
    form = Form(content_type)
    form.write(body)
    found = FormParts({}, {})
    for part in form.parts():
        if part.filename:
            upload = Upload(part.filename, part.content_type or _BYTES, bytes(part.data))
            found.files.setdefault(part.name, []).append(upload)
        else:
            found.fields.setdefault(part.name, []).append(part.data.decode(errors="replace"))
    return found
