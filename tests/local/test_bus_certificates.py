"""The certificate of the bus: who made it, when it is renewed, and files of the user that cannot be used."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest

from gpufn_local.bus_authority import own_certificate
from gpufn_local.bus_certificates import (
    end_of,
    expiring_files,
    given_certificate,
    with_own_authority,
)
from gpufn_platform.bus.tls import BusTls
from gpufn_platform.process.settings import InvalidSetting
from tests.certificates import Authority

NOW = datetime.datetime.now(datetime.UTC)
YEAR = datetime.timedelta(days=365)


def made(folder: Path, *names: str, now: datetime.datetime = NOW) -> tuple[bytes, bytes]:
    certificate = own_certificate(folder, names or ("10.0.0.1",), now)
    assert certificate.ca_file is not None
    return certificate.ca_file.read_bytes(), certificate.chain.read_bytes()


def test_files_are_private_and_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    first = made(folder)
    assert made(folder, now=NOW + YEAR / 2) == first
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "authority.pem": 0o600, "ca.pem": 0o600, "server.pem": 0o600,
    }  # fmt: skip


def test_a_certificate_is_renewed_by_the_same_authority(tmp_path: Path) -> None:
    ca, server = made(tmp_path)
    renewed_ca, renewed = made(tmp_path, now=NOW + 1.1 * YEAR)
    assert (renewed_ca, renewed != server) == (ca, True)
    other_names = made(tmp_path, "10.0.0.2", now=NOW + 1.1 * YEAR)
    assert (other_names[0], other_names[1] != renewed) == (ca, True)


@pytest.mark.parametrize("damage", ["authority.pem", "server.pem"])
def test_damaged_files_are_made_again(tmp_path: Path, damage: str) -> None:
    before = made(tmp_path)
    (tmp_path / damage).write_bytes(before[1][:300])
    after = made(tmp_path)
    assert after[1] != before[1]
    assert (after[0] == before[0]) is (damage == "server.pem")


def test_an_authority_that_has_ended_is_replaced(tmp_path: Path) -> None:
    ca, _ = made(tmp_path, now=NOW - 11 * YEAR)
    assert made(tmp_path)[0] != ca


def test_names_that_no_certificate_can_have_are_left_out(tmp_path: Path) -> None:
    assert made(tmp_path, "10.0.0.1", "Zoë's machine")[1]


def given(chain: Path, key: Path) -> dict[str, str]:
    return {"GPUFN_NATS_TLS_CERT": os.fspath(chain), "GPUFN_NATS_TLS_KEY": os.fspath(key)}


def test_files_of_the_user_are_used(tmp_path: Path) -> None:
    assert given_certificate({}) is None
    pair = Authority(tmp_path).issue("bus")
    certificate = given_certificate(given(*pair))
    assert certificate is not None
    assert (certificate.chain, certificate.key, certificate.ca_file) == (pair.chain, pair.key, None)


def test_files_that_nats_server_could_not_use_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.issue("bus"), authority.issue("other")
    with pytest.raises(InvalidSetting, match=rf"GPUFN_NATS_TLS_KEY={other.key} is not the key of .*{pair.chain}"):
        given_certificate(given(pair.chain, other.key))
    with pytest.raises(InvalidSetting, match="GPUFN_NATS_TLS_CERT"):
        given_certificate(given(tmp_path / "missing", pair.key))
    with pytest.raises(InvalidSetting, match="GPUFN_NATS_TLS_KEY"):
        given_certificate({"GPUFN_NATS_TLS_CERT": os.fspath(pair.chain)})
    expired = own_certificate(tmp_path / "tls", ["10.0.0.1"], NOW - 3 * YEAR)
    with pytest.raises(InvalidSetting, match=rf"GPUFN_NATS_TLS_CERT={expired.chain} has expired"):
        given_certificate(given(expired.chain, expired.key))


def test_the_ends_that_doctor_reports(tmp_path: Path) -> None:
    assert list(expiring_files({}, tmp_path)) == []
    made(tmp_path)
    ends = {path.name: end_of(path) for path, _ in expiring_files({}, tmp_path)}
    assert {name: end is not None and (end - NOW) // YEAR for name, end in ends.items()} == {
        "server.pem": 1, "ca.pem": 9,
    }  # fmt: skip
    assert [path for path, _ in expiring_files({"GPUFN_NATS_TLS_CERT": "/c"}, tmp_path)] == [Path("/c")]
    assert end_of(Path("/c")) is None


def test_commands_of_this_machine_trust_its_authority(tmp_path: Path) -> None:
    assert with_own_authority(BusTls(), tmp_path) == BusTls()
    made(tmp_path)
    assert with_own_authority(BusTls(), tmp_path) == BusTls(ca_file=os.fspath(tmp_path / "ca.pem"))
    assert with_own_authority(BusTls(ca="x"), tmp_path) == BusTls(ca="x")
