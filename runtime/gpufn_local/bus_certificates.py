"""The certificate of the bus: from an authority of our own (`bus_authority`), or from files of the user."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpufn_gateway.http.connection.certificate import server_context
from gpufn_platform.bus.tls import BusTls
from gpufn_platform.process.settings import InvalidSetting

CERT, KEY = "GPUFN_NATS_TLS_CERT", "GPUFN_NATS_TLS_KEY"


@dataclass(frozen=True)
class BusCertificate:
    """PEM files for nats-server. `ca_file` is the authority that clients trust; None if they know it otherwise."""

    chain: Path
    key: Path
    ca_file: Path | None = None


def given_certificate(environ: Mapping[str, str]) -> BusCertificate | None:
    """Return the user's files if they are set. Raises InvalidSetting if nats-server could not use them."""
    chain, key = environ.get("GPUFN_NATS_TLS_CERT", "").strip(), environ.get("GPUFN_NATS_TLS_KEY", "").strip()
    if not chain and not key:
        return None
    if not chain or not key:
        raise InvalidSetting(f"Set both {CERT} and {KEY}, or neither.")
    server_context(chain, key, chain_setting=CERT, key_setting=KEY)
    end = end_of(Path(chain))
    if end is not None and end < datetime.datetime.now(datetime.UTC):
        raise InvalidSetting(f"{CERT}={chain} has expired ({end:%Y-%m-%d}): renew it.")
    return BusCertificate(Path(chain).absolute(), Path(key).absolute())


def with_own_authority(tls: BusTls, folder: Path) -> BusTls:
    """Return `tls`, with the authority in `folder` if the settings name none."""
    ca_file = folder / "ca.pem"
    return replace(tls, ca_file=str(ca_file)) if not tls.ca and not tls.ca_file and ca_file.exists() else tls


def expiring_files(environ: Mapping[str, str], folder: Path) -> Iterator[tuple[Path, str]]:
    """Return each certificate of the bus on this machine, with the action to take when it ends."""
    if chain := environ.get("GPUFN_NATS_TLS_CERT", "").strip():
        yield Path(chain), "renew it, then send SIGHUP to nats-server, or restart the platform"
    elif (folder / "ca.pem").exists():
        yield folder / "server.pem", "restart the platform: a start renews it"
        yield folder / "ca.pem", f"remove {folder}, restart the platform, and copy nats/join to the other machines"


def end_of(chain: Path) -> datetime.datetime | None:
    """Return when the first certificate of a PEM file ends; None if there is none."""
    from cryptography import x509  # noqa: PLC0415  8 MB, which a bus without TLS does not need

    try:
        return x509.load_pem_x509_certificate(chain.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        return None
