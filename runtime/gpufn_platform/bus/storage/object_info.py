"""The description of a blob in a NATS object store: one message, which names the upload that has the chunks.

It is validated when read: another client may have written it, or only part of it may have been written.
"""

from __future__ import annotations

import base64
from typing import Annotated

import msgspec

from gpufn_platform.bus.storage.ordered_reader import StoredMessage


class BlobInfo(msgspec.Struct, frozen=True):
    name: str
    bucket: str
    nuid: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]+$")]  # upload id; purges use it in a subject
    size: int
    chunks: int
    digest: str
    deleted: bool = False


def read(message: StoredMessage) -> BlobInfo | None:
    """Decode a description. None if the message is no description, or describes another blob."""
    try:
        info = msgspec.json.decode(message.payload, type=BlobInfo)
    except msgspec.DecodeError:
        return None
    return info if subject(info.bucket, info.name) == message.subject else None


def subject(bucket: str, name: str) -> str:
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def wire_digest(digest: str) -> str:
    return f"SHA-256={base64.urlsafe_b64encode(bytes.fromhex(digest)).decode()}"
