"""Key files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpufn_core.errors import InvalidInput
from gpufn_core.signing.ed25519 import Signer, key_id, parse_public_key


def test_a_key_is_written_for_its_owner_only_and_read_again(tmp_path: Path) -> None:
    signer, path = Signer.new(), tmp_path / "key"
    signer.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert Signer.read(path).id == signer.id == key_id(parse_public_key(signer.public_pem()))
    with pytest.raises(FileExistsError):
        signer.write(path)


def test_a_key_of_openssl_is_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    command = ["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here")
    path.chmod(0o600)
    assert len(Signer.read(path).id) == 32


@pytest.mark.parametrize(("text", "mode"), [("", 0o600), ("-----BEGIN PRIVATE KEY-----\n", 0o600), (None, 0o644)])
def test_a_file_that_is_no_private_key_is_refused(tmp_path: Path, text: str | None, mode: int) -> None:
    path = tmp_path / "key"
    if text is None:
        Signer.new().write(path)
    else:
        path.write_text(text)
    path.chmod(mode)
    with pytest.raises(InvalidInput):
        Signer.read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        Signer.read(tmp_path / "none")


@pytest.mark.parametrize("text", ["", "x", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"])
def test_a_text_that_is_no_public_key_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_public_key(text)
