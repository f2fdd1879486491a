"""Sources of the master key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpufn_core.home import Home
from gpufn_core.spec.naming.secret_scopes import SecretRef
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.envelope import Keyring, new_master_key
from gpufn_platform.secrets.master_key import COMMAND, FILE, KEY, MasterKey

KEYS = Keyring([new_master_key()])


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def source(home: Home, **environ: str) -> MasterKey:
    return MasterKey.from_env(environ, home)


def loaded(master_key: MasterKey) -> tuple[bytes, ...]:
    keyring = master_key.load()
    return () if keyring is None else keyring.keys


def test_the_default_is_a_private_file_in_the_home(home: Home) -> None:
    master_key = source(home)
    assert master_key.load() is None
    master_key.create_file()
    assert home.master_key.stat().st_mode & 0o777 == 0o600
    keys = loaded(master_key)
    assert len(keys) == 1
    master_key.create_file()
    assert loaded(master_key) == keys


def test_the_key_is_read_from_a_variable_a_command_or_a_file(home: Home) -> None:
    file = home.root / "other"
    file.write_text(KEYS.text())
    file.chmod(0o600)
    assert loaded(source(home, **{KEY: KEYS.text()})) == KEYS.keys
    assert loaded(source(home, **{COMMAND: f"cat {file}"})) == KEYS.keys
    assert loaded(source(home, **{FILE: os.fspath(file)})) == KEYS.keys


def test_replacing_the_file_keeps_it_private(home: Home) -> None:
    master_key = source(home)
    master_key.create_file()
    master_key.replace_file(KEYS)
    assert loaded(master_key) == KEYS.keys
    assert home.master_key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "environ",
    [{KEY: "abc"}, {COMMAND: "false"}, {COMMAND: "/no/such/program"}, {COMMAND: "echo '"}, {FILE: "/etc"}],
)
def test_a_source_without_a_key_is_named(home: Home, environ: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(environ))):
        source(home, **environ).load()


def test_the_value_of_the_variable_is_in_no_error(home: Home) -> None:
    with pytest.raises(InvalidSetting) as error:
        source(home, **{KEY: "abcdef"}).load()
    assert "abcdef" not in error.value.message


def test_two_sources_contradict_each_other(home: Home) -> None:
    with pytest.raises(InvalidSetting, match=COMMAND):
        source(home, **{KEY: "a", COMMAND: "b"})


def test_a_file_that_others_can_read_is_refused(home: Home) -> None:
    home.master_key.write_text(KEYS.text())
    home.master_key.chmod(0o644)
    with pytest.raises(InvalidSetting, match="chmod 600"):
        source(home).load()


def test_a_wrong_or_missing_key_names_the_setting_and_the_secrets(home: Home) -> None:
    secret = KEYS.seal(SecretRef("TOKEN"), 1, "value", 5.0)
    master_key = source(home)
    with pytest.raises(InvalidSetting, match=rf"{FILE}.*TOKEN"):
        master_key.check([secret])
    master_key.create_file()
    with pytest.raises(InvalidSetting, match=rf"{FILE}.*TOKEN"):
        master_key.check([secret])
    master_key.check([])
    master_key.replace_file(KEYS)
    master_key.check([secret])
