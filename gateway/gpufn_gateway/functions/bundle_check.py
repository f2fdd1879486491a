"""Validation of uploaded bundles: whether agents may unpack them. Pure."""

from __future__ import annotations

from gpufn_core.domain.bundle_rules import checked_entries, open_bundle
from gpufn_core.errors import InvalidBundle
from gpufn_core.ids import digest_of


def check_bundle(data: bytes, digest: str) -> None:
    """Raises InvalidBundle."""
    if digest_of(data) != digest:
        raise InvalidBundle(f"The bundle does not have the digest {digest[:12]}: it was damaged in transit.")
    with open_bundle(data) as archive:
        checked_entries(archive)
