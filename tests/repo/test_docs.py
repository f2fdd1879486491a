"""The docs cover what exists: settings, commands, errors, states, decisions. Links lead somewhere."""

from __future__ import annotations

import enum
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gpufn_core.domain.devices.device import DeviceType, Health, Share
from gpufn_core.domain.invocation import InvocationState, OutcomeKind
from gpufn_core.domain.retry_policy import Settlement
from gpufn_core.domain.revision import RevisionState
from gpufn_core.domain.worker import Desired, WorkerState
from gpufn_core.errors import BY_CODE
from tests.conftest import ROOT, missing

DOCS = ROOT / "docs"
SOURCES = [path for folder in ("sdk", "gateway", "runtime", "builder") for path in (ROOT / folder).rglob("*.py")]
# Set by one of our processes for another, or for user code; not for a person to set.
_INTERNAL: set[str] = set()
_READ = re.compile(r"environ\w*(?:\.get\(|\[|, )\"(GPUFN_[A-Z_]+)\"")


def _pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md"), *ROOT.glob("*/README.md")]


def test_the_generated_reference_is_up_to_date() -> None:
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "reference", "--check"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_website_builds_without_warnings(tmp_path: Path) -> None:
    beside = Path(sys.executable).with_name("zensical")
    if not beside.exists():
        missing("zensical is not installed")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(DOCS, tmp_path / "docs")
    ended = subprocess.run(
        [beside, "build", "--strict", "-f", "mkdocs.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "site" / "architecture" / "1-synchronous-call" / "index.html").is_file()


def test_every_error_code_has_its_line() -> None:
    text = (DOCS / "reference" / "errors.md").read_text()
    assert [code for code in BY_CODE if f"| `{code}` |" not in text] == []


def test_every_variable_that_the_code_names_has_its_line() -> None:
    text = (DOCS / "reference" / "settings.md").read_text()
    read = {name for path in SOURCES for name in _READ.findall(path.read_text())}
    assert {"GPUFN_HOME", "GPUFN_URL"} <= read
    assert sorted(name for name in read - _INTERNAL if f"| `{name}` |" not in text) == []


def _commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        subcommand = command.get_command(context, name)
        assert subcommand is not None
        yield from _commands(subcommand, (*path, name))


def test_every_command_and_option_has_its_line() -> None:
    from gpufn.cli import app

    text = (DOCS / "reference" / "cli.md").read_text()
    lacking = []
    for path, command in _commands(app):
        name = " ".join(("gpufn", *path))
        section = re.search(rf"^## `{re.escape(name)}\b(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        if section is None:
            lacking.append(name)
            continue
        options = {option for param in command.params for option in param.opts if option.startswith("--")}
        lacking += [f"{name} {option}" for option in sorted(options - {"--help"}) if f"`{option}`" not in section[1]]
    assert lacking == []


def test_commands_in_the_pages_have_the_options_that_they_show() -> None:
    """Bug: costs.md showed `gpufn scale --min-workers`, which does not exist."""
    from gpufn.cli import app

    commands = {" ".join(path): command for path, command in _commands(app)}
    wrong = []
    for page in _pages():
        for line in re.findall(r"\bgpufn ([a-z][^`\n|#&;]*)", page.read_text()):
            words = line.partition(" -- ")[0].split()
            command = commands.get(" ".join(words[:2])) or commands.get(words[0])
            if command is None or words[0] == "run":  # its file declares further options
                continue
            known = {"--help", *(option for each in command.params for option in (*each.opts, *each.secondary_opts))}
            used = {word.partition("=")[0] for word in words if re.match("--[a-z]", word)}
            wrong += [f"{page.name}: gpufn {words[0]} {option}" for option in sorted(used - known)]
    assert wrong == []


@pytest.mark.parametrize(
    "states",
    [WorkerState, InvocationState, RevisionState, OutcomeKind, Settlement, Desired, Share, DeviceType, Health],
    ids=lambda states: states.__name__,
)
def test_every_state_is_in_the_glossary(states: type[enum.StrEnum]) -> None:
    text = (DOCS / "glossary.md").read_text()
    assert [state.value for state in states if f"`{state.value}`" not in text] == []


def test_every_decision_is_in_the_index() -> None:
    index = (DOCS / "decisions" / "README.md").read_text()
    pages = [path.name for path in (DOCS / "decisions").glob("[0-9]*.md")]
    assert [name for name in pages if f"]({name})" not in index] == []


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in _pages()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_each_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.parent.name != "decisions"}
    assert sorted(page for page in pages if f" {page}\n" not in navigation) == []
