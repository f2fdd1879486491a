"""The TLS certificate of the gateway, and its reload when its files change.

Each handshake uses the certificate that was loaded last. Open connections are not affected.
"""

from __future__ import annotations

import logging
import os
import ssl
from typing import Any

from gpufn_platform.process.settings import InvalidSetting

log = logging.getLogger(__name__)

_Versions = tuple[tuple[int, ...], ...]


class Certificate:
    """A certificate chain and its private key, from two PEM files. `context` belongs to the listening socket.
    `ends_at` is the end of the certificate, in unix seconds; None if it cannot be read."""

    def __init__(self, chain: str, key: str) -> None:
        """Load the files. Raises InvalidSetting."""
        self._chain, self._key = chain, key
        self._seen = self._loaded = self._versions()
        self.context = self._latest = server_context(chain, key)
        self.ends_at = _end_of(chain)
        self.context.sni_callback = self._use_latest  # OpenSSL calls it for clients without SNI too

    def reload_if_changed(self) -> None:
        """Load the files if they changed and were the same at the previous call: the two are not replaced at once.

        If they cannot be loaded, log it once and keep the old certificate.
        """
        seen, self._seen = self._seen, self._versions()
        if self._seen != seen or self._seen == self._loaded:
            return
        self._loaded = self._seen
        try:
            self._latest = server_context(self._chain, self._key)
        except InvalidSetting as error:
            log.error("the gateway keeps its old TLS certificate: %s", error.message)
        else:
            self.ends_at = _end_of(self._chain)
            log.info("the gateway loaded the new TLS certificate %s", self._chain)

    def _use_latest(self, connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._latest

    def _versions(self) -> _Versions:
        return _version(self._chain), _version(self._key)


def _end_of(chain: str) -> float | None:
    from cryptography import x509  # noqa: PLC0415  (a gateway without TLS starts without it)

    try:
        with open(chain, "rb") as file:
            return x509.load_pem_x509_certificates(file.read())[0].not_valid_after_utc.timestamp()
    except (OSError, ValueError, IndexError) as error:
        log.warning("the end of the TLS certificate %s is unknown: %s", chain, error)
        return None


def _version(path: str) -> tuple[int, ...]:
    """Return a value that changes with the file's content. It is empty if there is no such file."""
    try:
        status = os.stat(path)  # follows links: ACME clients replace the link
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def server_context(
    chain: str, key: str, *, chain_setting: str = "GPUFN_TLS_CERT", key_setting: str = "GPUFN_TLS_KEY"
) -> ssl.SSLContext:
    """Load the files that two settings name. Raises InvalidSetting with the name of the file at fault."""
    _check_readable(chain_setting, chain)
    _check_readable(key_setting, key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1", "h2"])  # gRPC clients offer only the second
    try:
        context.load_cert_chain(chain, key, password="")  # without a password, OpenSSL would read one from the terminal
    except (ssl.SSLError, OSError) as error:
        raise InvalidSetting(_problem(f"{chain_setting}={chain}", f"{key_setting}={key}", chain, error)) from error
    return context


def _check_readable(variable: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise InvalidSetting(f"{variable}={path}: {error.strerror}.") from error


def _problem(chain_name: str, key_name: str, chain: str, error: OSError) -> str:
    """Return the reason why OpenSSL did not load the files: its error does not name the file."""
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"{key_name} is not the key of the certificate {chain_name}."
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(chain)
    except ssl.SSLError:
        return f"{chain_name} is not a certificate in PEM format."
    return f"{key_name} is not a private key in PEM format without a password ({error})."
