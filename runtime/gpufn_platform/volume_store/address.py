"""The setting GPUFN_VOLUME_STORE, which names the store. All machines of a platform have the same. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_ADDRESS: Final = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9!_.*'()/-]{1,500}))?")


class S3Location(NamedTuple):
    """A bucket of an S3 store, and the text before the names of files in it."""

    bucket: str
    prefix: str


def s3_location(address: str) -> S3Location | None:
    """Return where the files of volumes are; None for the bus. Raises ValueError.

    >>> s3_location("s3://ours/gpufn/"), s3_location("s3://ours"), s3_location("")
    (S3Location(bucket='ours', prefix='gpufn/'), S3Location(bucket='ours', prefix=''), None)
    """
    if not address:
        return None
    match = _ADDRESS.fullmatch(address.rstrip("/"))
    if match is None:
        raise ValueError("write s3://bucket or s3://bucket/folder")
    return S3Location(match[1], f"{match[2]}/" if match[2] else "")


def checked(address: str) -> str:
    """Return the address. Raises ValueError."""
    s3_location(address)
    return address
