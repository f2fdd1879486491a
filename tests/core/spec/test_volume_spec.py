from __future__ import annotations

import pytest

from gpufn_core.errors import Conflict, InvalidSpec
from gpufn_core.spec.naming.names import HOME, Home
from gpufn_core.spec.volume_spec import (
    MAX_FILES,
    VolumeChange,
    VolumeFile,
    VolumeMount,
    VolumeRecord,
    VolumeTree,
    VolumeVersion,
    changed,
    check_base,
    check_mounts,
    full_name_at,
    stored_bytes,
)

A, B = VolumeFile("a", 1, "a" * 64), VolumeFile("d/b", 2, "b" * 64)


@pytest.mark.parametrize(
    "name",
    ["", "A", "a_b", "a/b", "a/b/c/d", "../a", "default/default/prod/search/a", "default/default/", "a" * 41, "a.b"],
)
def test_a_name_is_that_of_a_function(name: str) -> None:
    with pytest.raises(InvalidSpec):
        VolumeMount(name)


def test_names_start_in_the_home_of_their_code() -> None:
    assert full_name_at("a", HOME) == "a"
    assert full_name_at("default/default/a", Home("prod", "search")) == "a"


def test_a_function_declares_each_volume_once() -> None:
    with pytest.raises(InvalidSpec):
        check_mounts([VolumeMount("a"), VolumeMount("a", writable=True)])


def test_a_change_removes_first_and_adds_then() -> None:
    new = VolumeFile("a", 3, "c" * 64)
    assert changed("v", 2, [A, B], VolumeChange((new,), ("/",))).files == (new,)
    assert changed("v", 2, [A, B], VolumeChange((), ("d/", "a"))).files == ()
    with pytest.raises(InvalidSpec):
        changed("v", 2, [A], VolumeChange((VolumeFile("a/b", 1, "a" * 64),)))


def test_the_number_of_files_is_limited() -> None:
    files = tuple(VolumeFile(str(number), 1, "a" * 64) for number in range(MAX_FILES + 1))
    assert len(VolumeTree("v", 1, files[:-1]).files) == MAX_FILES
    with pytest.raises(InvalidSpec):
        VolumeTree("v", 1, files)


def test_a_base_is_the_newest_version() -> None:
    record = VolumeRecord("v", (VolumeVersion(1, "", 0, 0, 0.0), VolumeVersion(2, "", 0, 0, 0.0)))
    check_base("v", record, VolumeChange(base=2))
    check_base("v", None, VolumeChange(base=0))
    for stale in (0, 1, 3):
        with pytest.raises(Conflict):
            check_base("v", record, VolumeChange(base=stale))


def test_equal_contents_count_once() -> None:
    assert stored_bytes([[A, B], [A, VolumeFile("other", 2, B.digest)]]) == 3
