"""Variables with credentials for the origins of weights and for the store of volumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpufn_core.errors import ArtifactUnavailable

OF_AWS: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
CREDENTIALS: Final = ("HF_TOKEN", *OF_AWS)


def header_value(environ: Mapping[str, str], name: str, default: str = "") -> str:
    """Return the value of the variable `name`, for a header. Raises ArtifactUnavailable, without the value."""
    value = environ.get(name, "").strip() or default
    if not (value.isascii() and value.isprintable()):
        raise ArtifactUnavailable(f"{name} has characters other than printable ASCII: copy it again from its origin.")
    return value
