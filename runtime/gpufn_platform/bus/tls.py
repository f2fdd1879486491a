"""TLS of the connection to the bus: the authority that its certificate must have, and where plain text is allowed."""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gpufn_core.encoding.urls import is_loopback
from gpufn_platform.process.settings import InvalidSetting

CA, CA_FILE, PLAINTEXT = "GPUFN_NATS_CA", "GPUFN_NATS_CA_FILE", "GPUFN_NATS_PLAINTEXT"
NOTICE_DAYS: Final = 30  # a certificate that ends earlier is reported
_UNTRUSTED: Final = {18, 19, 20, 21}  # X509_V_ERR_*: self-signed, or without a known issuer
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64


@dataclass(frozen=True)
class BusTls:
    """How a process verifies the bus. Without an authority it trusts the public ones."""

    ca: str = ""
    ca_file: str = ""
    plaintext: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> BusTls:
        """Raises InvalidSetting."""
        ca, ca_file = environ.get("GPUFN_NATS_CA", "").strip(), environ.get("GPUFN_NATS_CA_FILE", "").strip()
        if ca and ca_file:
            raise InvalidSetting(f"{CA} and {CA_FILE} are set: set one of them.")
        plaintext = environ.get("GPUFN_NATS_PLAINTEXT", "").strip()
        if plaintext not in ("", "allow"):
            raise InvalidSetting(f"{PLAINTEXT}={plaintext!r}: write allow, or remove it.")
        return cls(ca, ca_file, bool(plaintext))

    @property
    def environment(self) -> dict[str, str]:
        """The settings for a process that `gpufn up` starts. Empty variables replace inherited ones."""
        ca_file = os.path.abspath(self.ca_file) if self.ca_file else ""  # its working folder is not ours
        return {CA: self.ca, CA_FILE: ca_file, PLAINTEXT: "allow" if self.plaintext else ""}

    def authority_text(self) -> str:
        """Return the authority in the form of GPUFN_NATS_CA; empty for the public ones. Raises InvalidSetting."""
        if self.ca or not self.ca_file:
            return self.ca
        context = self.context([])
        return base64.b64encode(b"".join(context.get_ca_certs(binary_form=True))).decode() if context else ""

    def allows(self, server: str) -> bool:
        """Return whether the transport to `server`, a URL, is allowed: TLS, this machine, or any with the setting."""
        parts = urlsplit(server)
        return parts.scheme == "tls" or self.plaintext or is_loopback(parts.hostname or "")

    def check(self, servers: list[str]) -> None:
        """Raises InvalidSetting for a server that would get the password in plain text."""
        for server in servers:
            if not self.allows(server):
                parts = urlsplit(server)
                where = f"{parts.hostname}:{parts.port or 4222}"
                raise InvalidSetting(
                    f"nats://{where} is not on this machine, and the password of the bus would travel unencrypted: "
                    f"write tls://{where} and set {CA_FILE} to its authority, or set {PLAINTEXT}=allow if this "
                    "network is yours alone."
                )

    def context(self, servers: list[str]) -> ssl.SSLContext | None:
        """Return the context that verifies `servers`; None if none of them needs TLS. Raises InvalidSetting."""
        if not self.ca and not self.ca_file and not any(urlsplit(server).scheme == "tls" for server in servers):
            return None
        try:
            if self.ca:
                return ssl.create_default_context(cadata=base64.b64decode(self.ca, validate=True))
            return ssl.create_default_context(cafile=self.ca_file or None)
        except (ssl.SSLError, ValueError):
            wanted = f"{CA} is not a certificate in base64 (DER)" if self.ca else f"{CA_FILE}={self.ca_file} is not PEM"
        except OSError as error:
            wanted = f"{CA_FILE}={self.ca_file}: {error.strerror}"
        raise InvalidSetting(f"{wanted}. It must be the certificate of the authority of the bus.")


PUBLIC_AUTHORITIES: Final = BusTls()


def problem_of(error: ssl.SSLError) -> str:
    """Return the reason of a failed handshake, and the remedy."""
    if not isinstance(error, ssl.SSLCertVerificationError):
        return f"the TLS handshake failed ({error.reason or error})"
    if error.verify_code in _UNTRUSTED:
        return f"its certificate is not from the authority that {CA} or {CA_FILE} names"
    if error.verify_code == _EXPIRED:
        return "its certificate has expired; renew it"
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet; check the clocks"
    if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
        return "its certificate is for another name or address; use one that the certificate has"
    return f"its certificate is not valid ({error.verify_message})"


def ends_at(transport_certificate: Mapping[str, object] | None) -> float | None:
    """Return when a peer's certificate ends, in unix seconds; None without TLS."""
    end = (transport_certificate or {}).get("notAfter")
    return ssl.cert_time_to_seconds(str(end)) if end else None


def days_left(transport_certificate: Mapping[str, object] | None, now: float) -> float | None:
    """Return the days until a peer's certificate ends; None without TLS. `now` is in unix seconds."""
    end = ends_at(transport_certificate)
    return None if end is None else (end - now) / 86_400
