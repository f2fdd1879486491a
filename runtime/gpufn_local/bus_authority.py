"""The authority of a platform that issues the certificates of its own bus.

Files in the folder: `authority.pem` (certificate and key, for 10 years), `ca.pem` (the certificate alone, for clients)
and `server.pem` (certificate and key of nats-server). A server's certificate is for two years. A start renews it in its
second year, so it ends only on a platform that runs for more than a year without one.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpufn_local.bus_certificates import BusCertificate
from gpufn_platform.process.private_files import replace_private

_DAY = datetime.timedelta(days=1)
_AUTHORITY_LASTS, _SERVER_LASTS, _RENEWAL = 3650 * _DAY, 730 * _DAY, 365 * _DAY
_CLOCK_SKEW = _DAY  # certificates are valid this long before now, for nodes whose clock is behind

_Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def own_certificate(folder: Path, names: Iterable[str], now: datetime.datetime) -> BusCertificate:
    """Return a certificate of our own authority for `names`, DNS names or addresses. Creates the authority once, and
    the certificate when it is missing, is for other names, or has less than a year left. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    authority_file, ca_file, server_file = (folder / name for name in ("authority.pem", "ca.pem", "server.pem"))
    authority = _read(authority_file)
    if authority is None or authority[0].not_valid_after_utc <= now:
        authority = _new_authority(now)
        replace_private(authority_file, _pem(*authority))
    replace_private(ca_file, authority[0].public_bytes(Encoding.PEM))
    wanted = _general_names(names)
    server = _read(server_file)
    if server is None or not _is_current(server[0], authority[0], wanted, now):
        replace_private(server_file, _pem(*_new_server(authority, wanted, now)))
    return BusCertificate(server_file, server_file, ca_file)


def _read(file: Path) -> _Pair | None:
    with contextlib.suppress(OSError, ValueError):
        data = file.read_bytes()
        key = load_pem_private_key(data, None)
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return x509.load_pem_x509_certificate(data), key
    return None


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> bytes:
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM) + secret


def _is_current(
    certificate: x509.Certificate, authority: x509.Certificate, names: list[x509.GeneralName], now: datetime.datetime
) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
        held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # cryptography raises several classes; in each case a new certificate is right
        return False
    return list(held) == names and certificate.not_valid_after_utc - now >= _RENEWAL


def _general_names(names: Iterable[str]) -> list[x509.GeneralName]:
    unique: dict[x509.GeneralName, None] = {}
    for name in names:
        try:
            unique[x509.IPAddress(ipaddress.ip_address(name))] = None
        except ValueError:
            with contextlib.suppress(ValueError):  # a host name that no certificate can have
                unique[x509.DNSName(name)] = None
    return list(unique)


def _new_authority(now: datetime.datetime) -> _Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpufn bus")])
    usage = _usage(key_cert_sign=True)
    builder = _builder(name, key, name, key.public_key(), (now, now + _AUTHORITY_LASTS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()), key


def _new_server(authority: _Pair, names: list[x509.GeneralName], now: datetime.datetime) -> _Pair:
    certificate, authority_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nats-server of gpufn")])
    until = min(now + _SERVER_LASTS, certificate.not_valid_after_utc)
    builder = _builder(name, key, certificate.subject, authority_key.public_key(), (now, until))
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(digital_signature=True), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority_key, hashes.SHA256()), key


def _builder(
    name: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePublicKey,
    period: tuple[datetime.datetime, datetime.datetime],
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(period[0] - _CLOCK_SKEW)
        .not_valid_after(period[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
