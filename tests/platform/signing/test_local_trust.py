"""The node's own rules of trust."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn_core.signing.ed25519 import Signer, key_id, parse_public_key
from gpufn_core.signing.trust import Trust, TrustedKey
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.signing.local_trust import FILE, MODE, LocalTrust

SIGNER, OTHER = Signer.new(), Signer.new()


def text_of(signer: Signer, require: str = '["prod"]') -> str:
    return f'require = {require}\n[keys.ci]\nfor = ["prod/*"]\npublic_key = """\n{signer.public_pem()}"""\n'


def shared() -> Trust:
    public = parse_public_key(OTHER.public_pem())
    key = TrustedKey(name="bus", id=key_id(public), public_key=public, patterns=("*",))
    return Trust(keys=(key,), required=frozenset({"dev"}))


def test_without_settings_the_rules_on_the_bus_count() -> None:
    assert LocalTrust.from_env({}).combine(shared()) == shared()


def test_the_file_replaces_the_keys_on_the_bus_which_can_only_add_requirements(tmp_path: Path) -> None:
    path = tmp_path / "trusted.toml"
    path.write_text(text_of(SIGNER))
    trust = LocalTrust.from_env({FILE: str(path)}).combine(shared())
    assert [(key.id, key.patterns) for key in trust.keys] == [(SIGNER.id, ("prod/*",))]
    assert (trust.required, trust.requires_all) == (frozenset({"prod", "dev"}), False)
    assert LocalTrust.from_env({MODE: "require"}).combine(shared()).requires_all
    assert LocalTrust.from_env({MODE: "off"}).is_off


def test_a_changed_file_is_read_again_and_a_wrong_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trusted.toml"
    path.write_text(text_of(SIGNER))
    local = LocalTrust.from_env({FILE: str(path)})
    assert not local.refresh()
    path.write_text(text_of(OTHER, require="[]"))
    assert local.refresh()
    assert [key.id for key in local.combine(Trust()).keys] == [OTHER.id]
    path.write_text("require = 1")
    with pytest.raises(InvalidSetting):
        local.refresh()
    path.unlink()
    with pytest.raises(InvalidSetting):
        local.refresh()


@pytest.mark.parametrize(
    "text", ["[", 'require = ["a b"]', "[keys.ci]\n", '[keys.ci]\npublic_key = "x"\n', "unknown = 1\n"]
)
def test_a_wrong_file_ends_the_process_at_its_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trusted.toml"
    path.write_text(text)
    with pytest.raises(InvalidSetting):
        LocalTrust.from_env({FILE: str(path)})
    path.write_text(text_of(SIGNER).replace("prod/*", "pro*"))
    with pytest.raises(InvalidSetting):
        LocalTrust.from_env({FILE: str(path)})
    path.write_text(text_of(SIGNER))
    path.chmod(0o666)
    with pytest.raises(InvalidSetting):
        LocalTrust.from_env({FILE: str(path)})


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidSetting):
        LocalTrust.from_env({MODE: "maybe"})
