"""The role table."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufn_gateway.auth.role_file import RoleFile
from gpufn_gateway.auth.roles import Roles, Workload, groups_in
from gpufn_platform.process.settings import InvalidSetting


@pytest.mark.parametrize(
    "text",
    [
        "groups = 1",
        "[groups]\ndevs = 'read'",
        "[groups]\ndevs = ['nonsense']",
        "[groups]\ndevs = ['deploy:pre*']",
        "[roles]\ndevs = ['read']",
        "[limits]\nrate = -1",
        "[limits]\nspeed = 1",
        "[[workloads]]\nissuer = 'http://ci.example.org'\naudience = 'a'\nsubject = 's'\nscopes = ['read']",
        "[[workloads]]\nissuer = 'https://ci.example.org'\nsubject = 's'\nscopes = ['read']",
        "[[workloads]]\nissuer = 'https://ci.example.org'\naudience = 'a'\nsubject = 's'\nscopes = ['x']",
        "no TOML",
        "\xff",
    ],
)
def test_a_table_with_an_error_ends_the_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "roles.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidSetting, match="GPUFN_OIDC_ROLES"):
        RoleFile(file)


@pytest.mark.parametrize("text", ["{", "[]", '{"groups": {"devs": ["nonsense"]}}', '{"roles": {}}'])
def test_an_error_in_json(tmp_path: Path, text: str) -> None:
    file = tmp_path / "roles.json"
    file.write_text(text)
    with pytest.raises(InvalidSetting, match="GPUFN_OIDC_ROLES"):
        RoleFile(file)


def test_a_table_in_json(tmp_path: Path) -> None:
    file = tmp_path / "roles.json"
    file.write_text('{"groups": {"devs": ["read"]}, "limits": {"rate": 5}}')
    roles = RoleFile(file).roles()
    assert (roles.groups, roles.limits.rate) == ({"devs": ("read",)}, 5.0)


def test_a_table_that_does_not_exist_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="GPUFN_OIDC_ROLES"):
        RoleFile(tmp_path / "roles.toml")


def test_the_scopes_of_several_groups_add_up() -> None:
    roles = Roles.parse(b"[groups]\na = ['read']\nb = ['invoke:*', 'read']")
    assert roles.scopes_of_groups(["a", "b", "c"]) == {"read", "invoke:*"}
    assert roles.scopes_of_groups([]) == set()


@pytest.mark.parametrize("claims", [{}, {"groups": None}, {"groups": 7}, {"groups": {"a": 1}}, {"groups": [1, None]}])
def test_a_claim_without_groups(claims: dict[str, object]) -> None:
    assert groups_in(claims, "groups") == []


def test_only_asterisks_are_special_in_a_subject() -> None:
    job = Workload("https://ci", "a", "repo:acme/[x].*:main", ("read",))
    assert job.matches("https://ci", ["a"], "repo:acme/[x].y:main")
    for subject in ("repo:acme/x.y:main", "repo:acme/[x]yy:main", "repo:acme/[x].y:main\n", "xrepo:acme/[x].y:main"):
        assert not job.matches("https://ci", ["a"], subject)
    assert not job.matches("https://ci", ["b"], "repo:acme/[x].y:main")
    assert not job.matches("https://other", ["a"], "repo:acme/[x].y:main")
