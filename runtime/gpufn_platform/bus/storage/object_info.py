"""What describes a blob on the bus, as NATS object stores have it: one message, which names the upload with its chunks.

It is read with distrust: it was perhaps written by another client, or by half.
"""

from __future__ import annotations

import base64
from typing import Annotated

import msgspec

from gpufn_platform.bus.storage.ordered_reader import StoredMessage


class BlobInfo(msgspec.Struct, frozen=True):
    name: str
    bucket: str
    nuid: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]+$")]  # of the upload; what is purged is named by it
    size: int
    chunks: int
    digest: str
    deleted: bool = False


def read(message: StoredMessage) -> BlobInfo | None:
    """None for what is no description, or that of something else."""
    try:
        info = msgspec.json.decode(message.payload, type=BlobInfo)
    except msgspec.DecodeError:
        return None
    return info if subject(info.bucket, info.name) == message.subject else None


def subject(bucket: str, name: str) -> str:
    return f"$O.{bucket}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"


def wire_digest(digest: str) -> str:
    return f"SHA-256={base64.urlsafe_b64encode(bytes.fromhex(digest)).decode()}"
