"""Files in the input of predictions: their bytes are counted before they are read."""

from __future__ import annotations

from typing import Any

import pytest

from gpufn_core.errors import PayloadTooLarge
from gpufn_core.protocol.records import BodyReference, ClientFile
from gpufn_gateway.protocols.replicate.files import InputFiles

URL = "http://x/replicate/v1/files/f"
DATA = bytes(300)  # 400 bytes in base64


class OneFile:
    """A store whose every id is the same file."""

    def __init__(self) -> None:
        self.reads = 0

    async def find(self, owner: str, id_: str) -> ClientFile:
        return ClientFile(
            id=id_, owner=owner, name="f", content_type="text/plain", size=len(DATA), purpose="", created_at=0.0,
            expires_at=1.0, reference=BodyReference("o", "d", len(DATA)),
        )  # fmt: skip

    async def read(self, file: ClientFile) -> bytes:
        self.reads += 1
        return DATA


async def test_no_file_beyond_the_limit_for_arguments_is_read() -> None:
    store: Any = OneFile()
    resolved = await InputFiles(store, "o", {}, limit_bytes=1200).resolve({"a": URL, "b": [URL, URL]})
    assert [len(each.partition(",")[2]) for each in (resolved["a"], *resolved["b"])] == [400, 400, 400]
    store.reads = 0
    with pytest.raises(PayloadTooLarge):
        await InputFiles(store, "o", {}, limit_bytes=1200).resolve({"a": URL, "b": [URL] * 300})
    assert store.reads == 3
