from __future__ import annotations

from pathlib import Path

from gpufn_platform.sandbox.host_paths import behind_links, private_paths, python_folders


def test_folders_of_the_interpreter_omit_nested_folders() -> None:
    assert python_folders(["/srv/py/lib", "", "relative", "/srv/app"], ["/usr", "/srv/py"]) == ("/srv/py", "/srv/app")


def test_paths_behind_links_are_listed_by_their_real_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    assert behind_links(tmp_path / "real", tmp_path / "link", tmp_path / "link" / "home") == (
        f"{tmp_path}/real",
        f"{tmp_path}/real/home",
    )


def test_private_paths_are_unreadable_for_other_users(tmp_path: Path) -> None:
    for name, mode in (("key", 0o600), ("public", 0o644)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed" / "inside").touch()
    (tmp_path / "link").symlink_to("key")
    assert private_paths(str(tmp_path)) == (f"{tmp_path}/closed", f"{tmp_path}/key")
