"""The private key that signs deploys, from an argument or GPUFN_SIGNING_KEY."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpufn_core.errors import GpufnError

if TYPE_CHECKING:
    from gpufn_core.signing.ed25519 import Signer

VARIABLE = "GPUFN_SIGNING_KEY"


def signer_class() -> type[Signer]:
    """Return the class Signer. Raises GpufnError without the package `cryptography`, which a laptop may not have."""
    try:
        from gpufn_core.signing.ed25519 import Signer  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "cryptography":
            raise
        raise GpufnError("signing needs the package cryptography: pip install 'gpufn[signing]'") from error
    return Signer


def read_signer(path: str | os.PathLike[str] | None = None) -> Signer | None:
    """Read the key in `path`, otherwise the key that GPUFN_SIGNING_KEY names; None without either. Raises
    InvalidInput."""
    file = os.fspath(path) if path is not None else os.environ.get(VARIABLE, "").strip()
    return signer_class().read(Path(file)) if file else None
