"""Variables with credentials for the origins of weights. Only agents keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpufn_core.errors import ArtifactUnavailable

CREDENTIALS: Final = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def header_value(environ: Mapping[str, str], name: str, default: str = "") -> str:
    """Return the variable `name`, for a header. Raises ArtifactUnavailable, without the value."""
    value = environ.get(name, "").strip() or default
    if not (value.isascii() and value.isprintable()):
        raise ArtifactUnavailable(f"{name} has characters other than printable ASCII: copy it again from its origin.")
    return value
