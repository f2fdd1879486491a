"""Packages that CI and the images install."""

from __future__ import annotations

import re

from tests.conftest import ROOT


def test_each_package_of_ci_is_pinned_and_hashed() -> None:
    text = re.sub(r"^#.*\n", "", (ROOT / ".ci" / "requirements.txt").read_text(), flags=re.MULTILINE)
    entries = text.replace("\\\n", "").splitlines()
    assert len(entries) > 50
    wrong = [
        entry
        for entry in entries
        if not re.fullmatch(r"[\w.-]+==\S+( ;[^#]*?)? +(--hash=sha256:[0-9a-f]{64} *)+", entry)
    ]
    assert wrong == []


def test_ci_installs_no_other_file() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    installs = [line for line in lines if "pip install" in line or ("scripts/install" in line and line[0] != "#")]
    assert [("--require-hashes" in line, "PIP_NO_INDEX=1" in line) for line in installs] == [
        (True, False),
        (False, True),
    ]


def test_an_image_gets_wheels_only_and_no_compiler() -> None:
    _, *stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    images = [stage for stage in stages if not stage.splitlines()[0].endswith((" AS wheels", " AS console"))]
    assert len(images) == 5
    for image in images:
        assert not re.search(r"\b(apt|apt-get|gcc|g\+\+|build-essential|cc)\b", image)
        assert all(
            "--only-binary :all:" in line or "--no-deps" in line for line in re.findall(r".*pip install.*", image)
        )
