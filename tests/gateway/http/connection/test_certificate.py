"""The gateway's certificate: its files, their errors, and their reload."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufn_gateway.http.connection.certificate import Certificate
from gpufn_platform.process.settings import InvalidSetting
from tests.certificates import Authority, Pair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Pair:
    pair = Pair(tmp_path / "chain.pem", tmp_path / "key.pem")
    _replace(pair, authority.issue("first"))
    return pair


def _replace(files: Pair, by: Pair) -> None:
    for target, source in zip(files, by, strict=True):
        part = target.with_suffix(".part")
        shutil.copyfile(source, part)
        part.replace(target)


def _shown(certificate: Certificate, authority: Authority, name: str | None = "localhost", **limits: int) -> str:
    """Return the subject of the certificate that a client receives."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with ours:
            try:
                certificate.context.wrap_socket(ours, server_side=True).close()
            except ssl.SSLError:
                return

    server = threading.Thread(target=serve)
    server.start()
    client = ssl.create_default_context(cafile=os.fspath(authority.file))
    client.check_hostname = name is not None
    if "maximum" in limits:
        client.minimum_version = client.maximum_version = ssl.TLSVersion(limits["maximum"])
        client.set_ciphers("DEFAULT@SECLEVEL=0")  # allows TLS 1.1
    try:
        with theirs, client.wrap_socket(theirs, server_hostname=name) as connection:
            subject = dict(each[0] for each in (connection.getpeercert() or {})["subject"])  # type: ignore[misc]
            return str(subject["commonName"])
    finally:
        server.join()


@pytest.mark.parametrize("name", ["localhost", None])
def test_new_files_are_used_once_they_stay_the_same(files: Pair, authority: Authority, name: str | None) -> None:
    certificate = Certificate(*map(os.fspath, files))
    assert _shown(certificate, authority, name) == "first"
    _replace(files, authority.issue("second"))
    certificate.reload_if_changed()
    assert _shown(certificate, authority, name) == "first"
    certificate.reload_if_changed()
    assert _shown(certificate, authority, name) == "second"


def _mismatch(files: Pair, authority: Authority) -> Path:
    shutil.copyfile(authority.issue("other").key, files.key)
    return files.key


def _damaged_chain(files: Pair, authority: Authority) -> Path:
    files.chain.write_bytes(files.chain.read_bytes()[:100])
    return files.chain


def _damaged_key(files: Pair, authority: Authority) -> Path:
    files.key.write_text("no key")
    return files.key


def _key_with_password(files: Pair, authority: Authority) -> Path:
    key = authority.issue("password").key
    options = ("-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(files.key))
    subprocess.run(["openssl", "pkey", *options], check=True, capture_output=True)
    return files.key


def _no_chain(files: Pair, authority: Authority) -> Path:
    files.chain.unlink()
    return files.chain


def _folder_as_key(files: Pair, authority: Authority) -> Path:
    files.key.unlink()
    files.key.mkdir()
    return files.key


BAD = [_mismatch, _damaged_chain, _damaged_key, _key_with_password, _no_chain, _folder_as_key]


@pytest.mark.parametrize("spoil", BAD)
def test_bad_files_are_refused_with_the_name_of_the_file(
    files: Pair, authority: Authority, spoil: Callable[[Pair, Authority], Path]
) -> None:
    at_fault = spoil(files, authority)
    with pytest.raises(InvalidSetting, match=str(at_fault)):
        Certificate(*map(os.fspath, files))


@pytest.mark.parametrize("spoil", BAD)
def test_bad_files_leave_the_old_certificate_and_one_line_in_the_log(
    files: Pair, authority: Authority, spoil: Callable[[Pair, Authority], Path], caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(*map(os.fspath, files))
    at_fault = spoil(files, authority)
    for _ in range(4):
        certificate.reload_if_changed()
    assert _shown(certificate, authority) == "first"
    assert [str(at_fault) in record.getMessage() for record in caplog.records] == [True]


def test_files_that_return_are_loaded(files: Pair, authority: Authority) -> None:
    certificate = Certificate(*map(os.fspath, files))
    files.chain.unlink()
    for _ in range(2):
        certificate.reload_if_changed()
    _replace(files, authority.issue("third"))
    for _ in range(2):
        certificate.reload_if_changed()
    assert _shown(certificate, authority) == "third"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
def test_versions_before_1_2_are_refused(files: Pair, authority: Authority) -> None:
    certificate = Certificate(*map(os.fspath, files))
    assert _shown(certificate, authority, maximum=ssl.TLSVersion.TLSv1_2) == "first"
    with pytest.raises(ssl.SSLError):
        _shown(certificate, authority, maximum=ssl.TLSVersion.TLSv1_1)
