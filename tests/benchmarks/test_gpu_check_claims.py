"""Claims about GPUs: each is in the documentation, its steps exist, and reports decide its state."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest

from gpu_check.catalogue import STEPS
from gpu_check.claims import CLAIMS, Claim, ClaimState, page, status_of
from gpu_check.findings import Report, Result, State
from tests.conftest import ROOT

CLAIM = Claim("docs/gpu.md", "it works", ("one", "two"))
# These steps record or measure; they prove no claim of the documentation.
_CLAIMS_NOTHING = {"programs", "cuda", "copies", "copies-10gb", "overlap"}
# Pages that mention GPUs and claim nothing that only a GPU proves: they name fields, limits and prices, or link.
_WITHOUT_CLAIMS = {
    *("bounds", "classes", "console", "costs", "develop", "glossary", "gpu-claims", "history", "http", "index"),
    *("look-at", "operations", "quick-start", "shell", "teams", "traffic"),
}
_ABOUT_GPUS = re.compile(r"\b(GPUs?|CUDA|MPS|MIG|NCCL|NVML|TensorRT)\b")


def _words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.quote[:40])
def test_a_claim_is_in_the_documentation_and_its_steps_exist(claim: Claim) -> None:
    assert _words(claim.quote) in _words((ROOT / claim.page).read_text())
    assert set(claim.steps) <= {step.name for step in STEPS}
    assert claim.steps or claim.lacks
    assert "|" not in claim.quote, "it would end a cell of the table"


def test_each_step_proves_a_claim() -> None:
    named = {step for claim in CLAIMS for step in claim.steps}
    assert {step.name for step in STEPS} - named == _CLAIMS_NOTHING
    assert len({claim.quote for claim in CLAIMS}) == len(CLAIMS)


def test_each_section_about_gpus_has_a_claim() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text().partition("## What ran where")[0]
    sections = re.split(r"(?m)^## ", text)[1:]
    quotes = [_words(claim.quote) for claim in CLAIMS if claim.page == "docs/gpu.md"]
    assert len(sections) > 5
    assert [each.splitlines()[0] for each in sections if not any(quote in _words(each) for quote in quotes)] == []


def test_each_page_about_gpus_has_a_claim_or_needs_none() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    about_gpus = {str(page.relative_to(ROOT)) for page in pages if _ABOUT_GPUS.search(page.read_text())}
    with_claims = {claim.page for claim in CLAIMS}
    assert about_gpus == with_claims | {f"docs/{page}.md" for page in _WITHOUT_CLAIMS}
    assert not with_claims & {f"docs/{page}.md" for page in _WITHOUT_CLAIMS}


def _report(date: str, *results: tuple[str, State], pretended: bool = False) -> Report:
    return Report(
        date=date, device="NVIDIA X", driver="1", pretended=pretended, machine={},
        results=[Result(step=step, state=state) for step, state in results],
    )  # fmt: skip


BOTH = (("one", State.PASSED), ("two", State.PASSED))


@pytest.mark.parametrize(
    ("reports", "state", "detail"),
    [
        ([], ClaimState.NOT_RUN, ""),
        ([_report("1", BOTH[0])], ClaimState.NOT_RUN, ""),
        ([_report("1", *BOTH, pretended=True)], ClaimState.NOT_RUN, ""),
        ([_report("1", BOTH[0], ("two", State.SKIPPED))], ClaimState.NOT_RUN, ""),
        ([_report("1", *BOTH)], ClaimState.PROVEN, "1, NVIDIA X"),
        ([_report("1", BOTH[0]), _report("2", BOTH[1])], ClaimState.PROVEN, "1, NVIDIA X"),
        ([_report("1", *BOTH), _report("2", ("two", State.TIMED_OUT))], ClaimState.FAILED, "2, NVIDIA X, two"),
        ([_report("1", ("two", State.FAILED)), _report("2", *BOTH)], ClaimState.PROVEN, "2, NVIDIA X"),
        ([_report("1", *BOTH), _report("2", ("two", State.SKIPPED))], ClaimState.PROVEN, "1, NVIDIA X"),
    ],
)
def test_the_newest_result_of_each_step_on_a_gpu_decides(
    reports: Sequence[Report], state: ClaimState, detail: str
) -> None:
    status = status_of(CLAIM, reports)
    assert (status.state, status.detail) == (state, detail)


def test_raw_answers_prove_nothing_by_themselves() -> None:
    claim = Claim("docs/gpu.md", "it works", ("one",), records=True)
    assert status_of(claim, [_report("1", *BOTH)]).state is ClaimState.RECORDED


@pytest.mark.parametrize(("steps", "state"), [((), ClaimState.NOT_RUN), (("one",), ClaimState.PARTLY)])
def test_a_claim_that_lacks_something_is_proven_in_part_at_most(steps: tuple[str, ...], state: ClaimState) -> None:
    claim = Claim("docs/gpu.md", "it works", steps, lacks="two GPUs")
    assert status_of(claim, [_report("1", *BOTH)]).state is state


def test_a_step_that_the_time_of_the_check_cut_short_has_not_failed() -> None:
    report = _report("1", *BOTH)
    cut = msgspec.structs.replace(report.results[0], state=State.TIMED_OUT, is_left=True)
    assert status_of(CLAIM, [msgspec.structs.replace(report, results=[cut])]).state is ClaimState.NOT_RUN


def test_the_page_has_the_state_of_each_claim() -> None:
    text = page([_report("2", *BOTH), _report("1", ("one", State.FAILED))], [CLAIM])
    assert "| it works | `one`, `two` | proven: 2, NVIDIA X |" in text
    assert "1 proven" in text
