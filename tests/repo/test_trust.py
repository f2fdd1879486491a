"""Each claim of docs/trust.md has tests. `trust.toml` names them by section, and by row or beginning of a text."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from tests.conftest import ROOT

_PAGE = ROOT / "docs" / "trust.md"
_CLAIMS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "tests" / "repo" / "trust.toml").read_text())
_EVIDENCE_BY_SENTENCE = {"Threat model"}  # in the other sections, by paragraph and bullet


def _plain(text: str) -> str:
    """Remove the markup of a text.

    >>> _plain('**With** [a `link`](x.md)')
    'With a link'
    """
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "").replace("**", "")


def _sections() -> Iterator[tuple[str, list[str]]]:
    """Yield the sections, with their blocks: paragraphs, bullets and rows of tables, each in one line."""
    _, *sections = re.split(r"^## ", re.sub(r"```.*?```", "", _PAGE.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    for section in sections:
        title, _, text = section.partition("\n")
        blocks = re.split(r"\n\s*\n|\n(?=- |\|)", text)
        yield title, [" ".join(block.split()) for block in blocks if block.strip()]


def _rows(blocks: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the first cell of each row, and the names of the other columns."""
    columns: list[str] = []
    for number, block in enumerate(blocks):
        if not block.startswith("|"):
            continue
        first, *others = (_plain(cell.strip()) for cell in block.strip("|").split("|"))
        if number + 1 < len(blocks) and blocks[number + 1].startswith("|---"):
            columns = others
        elif not block.startswith("|---"):
            yield first, columns


def _texts(title: str, blocks: list[str]) -> Iterator[str]:
    for block in blocks:
        text = _plain(block.removeprefix("- "))
        if not block.startswith("|"):
            yield from re.split(r"(?<=\.) (?=[A-Z])", text) if title in _EVIDENCE_BY_SENTENCE else (text,)


@functools.cache
def _names(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_bytes())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _exists(test: str) -> bool:
    """Return whether a test exists. `path::name[case]` also needs the case as a text of the file."""
    path, _, name = test.partition("::")
    if not (ROOT / path).is_file():
        return False
    name, _, case = name.partition("[")
    return (not name or name in _names(path)) and (not case or f'"{case[:-1]}"' in (ROOT / path).read_text())


def _tests(claim: Any) -> list[str]:
    lists = claim.values() if isinstance(claim, dict) else [claim]
    return [test for tests in lists if not isinstance(tests, str) for test in tests]


def test_each_row_and_text_of_the_page_has_its_tests() -> None:
    lacking, named = [], set()
    for title, blocks in _sections():
        claims = _CLAIMS.get(title, {})
        for row, columns in _rows(blocks):
            named.add((title, row))
            claim = claims.get(row)
            if not claim or (isinstance(claim, dict) and "why" not in claim and set(claim) != set(columns)):
                lacking.append(f"{title}: | {row} | {columns}")
        for text in _texts(title, blocks):
            beginnings = [each for each in claims if text.startswith(each)]
            named |= {(title, each) for each in beginnings}
            if len(beginnings) != 1:
                lacking.append(f"{title}: {text[:90]} {beginnings}")
    assert lacking == []
    assert {(title, name) for title, claims in _CLAIMS.items() for name in claims} - named == set()


def test_each_test_of_a_claim_exists_and_a_claim_without_one_has_its_reason() -> None:
    claims = [(name, claim) for claims in _CLAIMS.values() for name, claim in claims.items()]
    assert [test for _, claim in claims for test in _tests(claim) if not _exists(test)] == []
    without = [name for name, claim in claims if not _tests(claim)]
    assert [name for name, claim in claims if name in without and not claim.get("why")] == []
