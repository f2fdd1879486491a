"""Files in the input of a prediction: URLs of uploaded files, and data URLs."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, Final

from gpufn_core.errors import PayloadTooLarge
from gpufn_core.protocol.records import ClientFile
from gpufn_core.spec.units import format_bytes
from gpufn_gateway.protocols.client_files import ClientFiles
from gpufn_gateway.protocols.replicate.models import timestamp
from gpufn_gateway.protocols.replicate.predictions import PREFIX, data_url

_FILE_URL: Final = re.compile(rf"https?://[^/\s]+{PREFIX}/files/([^/\s]+)")
_DATA_URL: Final = re.compile(r"data:[^,]*;base64,")


def view(file: ClientFile, base: str) -> dict[str, Any]:
    return {
        "id": file.id,
        "name": file.name,
        "content_type": file.content_type,
        "size": file.size,
        "etag": file.reference.digest,
        "checksums": {"sha256": file.reference.digest},
        "metadata": {},
        "created_at": timestamp(file.created_at),
        "expires_at": timestamp(file.expires_at),
        "urls": {"get": f"{base}{PREFIX}/files/{file.id}"},
    }


class InputFiles:
    """Replaces the URLs of files by their bytes, for one call. The worker may have no network, and has no API key.

    The encoded files of a call have at most `limit_bytes` together."""

    def __init__(self, files: ClientFiles, owner: str, properties: Mapping[str, Any], limit_bytes: int) -> None:
        self._files = files
        self._owner = owner
        self._properties = properties
        self._limit_bytes = limit_bytes
        self._used_bytes = 0

    async def resolve(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments. A parameter that takes bytes gets base64, any other a data URL. Raises RouteError 404
        for a file of another API key, PayloadTooLarge."""
        return {name: await self._value(value, self._properties.get(name, {})) for name, value in given.items()}

    async def _value(self, value: Any, schema: Mapping[str, Any]) -> Any:
        if isinstance(value, list):
            return [await self._value(item, schema.get("items") or {}) for item in value]
        if not isinstance(value, str):
            return value
        takes_bytes = isinstance(schema, Mapping) and schema.get("contentEncoding") == "base64"
        if (url := _FILE_URL.fullmatch(value)) is not None:
            file = await self._files.find(self._owner, url[1])
            self._reserve((file.size + 2) // 3 * 4)
            data = await self._files.read(file)
            return base64.b64encode(data).decode() if takes_bytes else data_url(file.content_type, data)
        return _DATA_URL.sub("", value, count=1) if takes_bytes and _DATA_URL.match(value) else value

    def _reserve(self, size: int) -> None:
        """Count the bytes of an encoded file before it is read."""
        self._used_bytes += size
        if self._used_bytes > self._limit_bytes:
            raise PayloadTooLarge(
                f"The files in the input exceed the limit for a call's arguments, {format_bytes(self._limit_bytes)}: "
                "pass fewer or smaller files."
            )
