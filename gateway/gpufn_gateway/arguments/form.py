"""Arguments from a form (`multipart/form-data`), as `curl -F` and browsers send it. Pure.

For a parameter that takes bytes, the part is the argument. Every other part is text and is parsed like a value of a
query string.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from gpufn_core.errors import InvalidInput
from gpufn_gateway.arguments.query import MAX_VALUES, check_name, values
from gpufn_gateway.arguments.signature import Signature

_PLAIN_ENCODINGS: Final = ("", "7bit", "8bit", "binary")  # values of Content-Transfer-Encoding


class Part(NamedTuple):
    """One part of a form. `filename` is "" unless the part is a file."""

    name: str
    filename: str
    content_type: str
    data: bytearray


class Form:
    """The parts of one body, written in pieces. `content_type` is the Content-Type of the request.

    All methods raise InvalidInput, with the name of the part as its field if the name is known.
    """

    def __init__(self, content_type: str) -> None:
        self._parts: list[Part] = []
        self._headers: dict[str, str] = {}
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._complete = False
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise InvalidInput("the form has no boundary: send Content-Type: multipart/form-data; boundary=...")
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._on_header_name,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._on_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _not_valid(error) from None

    def write(self, data: bytes) -> None:
        """Parse the next piece of the body."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _not_valid(error, self._part_name) from None

    def parts(self) -> list[Part]:
        """Return the parts of a complete body, in order."""
        if not self._complete:
            raise _not_valid("it ends before its closing boundary", self._part_name)
        return self._parts

    def arguments(self, signature: Signature) -> dict[str, Any]:
        """Return the arguments of a complete body."""
        bytes_by_name: dict[str, bytearray] = {}
        texts: dict[str, list[str]] = {}
        for name, _, _, data in self.parts():
            check_name(name, signature, signature.names, "the form")
            if name not in signature.bytes_names:
                texts.setdefault(name, []).append(_text(name, data))
            elif name in bytes_by_name:
                raise InvalidInput(f"{name}: the form has two parts with this name", field=name)
            else:
                bytes_by_name[name] = data
        return {**values(texts, signature, raw_names=bytes_by_name), **bytes_by_name}

    @property
    def _part_name(self) -> str | None:
        return self._parts[-1].name if self._parts else None

    def _begin_part(self) -> None:
        self._headers.clear()

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.decode("latin-1").lower()] = self._header_value.decode("latin-1").strip()
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        if len(self._parts) == MAX_VALUES:
            raise InvalidInput(f"the form has more than {MAX_VALUES} parts")
        kind, options = parse_options_header(self._headers.get("content-disposition"))
        name = options.get(b"name", b"").decode(errors="replace")
        if kind != b"form-data" or not name:
            raise _not_valid(
                f'part {len(self._parts) + 1} has no name: each needs Content-Disposition: form-data; name="..."'
            )
        encoding = self._headers.get("content-transfer-encoding", "")
        if encoding.lower() not in _PLAIN_ENCODINGS:
            raise InvalidInput(f"{name}: send the part unencoded, without Content-Transfer-Encoding", field=name)
        filename = options.get(b"filename", b"").decode(errors="replace")
        self._parts.append(Part(name, filename, self._headers.get("content-type", ""), bytearray()))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        self._parts[-1].data.extend(memoryview(data)[start:end])

    def _end(self) -> None:
        self._complete = True


def _text(name: str, data: bytearray) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidInput(
            f"{name}: the part is not UTF-8, and this argument does not take bytes", field=name
        ) from None


def _not_valid(reason: object, part: str | None = None) -> InvalidInput:
    where = "" if part is None else f" in or after its part {part[:80]!r}"
    return InvalidInput(f"the form is not valid{where}: {reason}", field=part)
