"""Packages per function, without containers and without a network. docs/packages.md describes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Platform, running_platform
from tests.wheels import repack, use_only, write_wheel

pytestmark = pytest.mark.e2e

APP = Path(__file__).parent / "apps" / "packaged.py"


@pytest.fixture(scope="module")
def platform_(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("packages")
    # Python runs this line at its start.
    spy = f"import os, sys; sys.saw_platform = os.path.exists({str(folder / 'home' / 'nats')!r})\n"
    for version in ("1", "2"):
        write_wheel(folder / "wheels", "tint", version, f"VERSION = {version!r}\n", others={"tint.pth": spy})
    for name in ("cloudpickle", "msgspec"):
        repack(folder / "wheels", name)
    with pytest.MonkeyPatch.context() as patch:
        use_only(folder / "wheels", patch)
        with running_platform(folder / "home") as platform:
            yield platform


def test_functions_with_contradicting_packages_run_side_by_side(platform_: Platform) -> None:
    platform_.gpufn("deploy", APP)
    assert platform_.invoke("old") == ["1", "", "OSError"]
    assert platform_.invoke("new") == ["2", "dark", "OSError"]


def test_code_that_a_package_runs_at_the_start_of_python_is_in_the_sandbox(platform_: Platform) -> None:
    platform_.gpufn("deploy", APP)
    assert (platform_.home / "nats").exists()
    assert platform_.invoke("spied") == {"saw_platform": False}
