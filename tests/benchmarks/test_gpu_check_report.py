"""The reports that are written, and the command line that writes them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import msgspec
import pytest

from gpu_check import page, report
from gpu_check.catalogue import STEPS, TOTAL_S
from gpu_check.findings import Finding, Plot, Report, Result, State, Table
from gpu_check.load import CallStats
from tests.conftest import ROOT

TITLE = "Calls per second"
LABELS = ("1", "8")


def found(how: str, *values: float | None) -> Result:
    plot = Plot(TITLE, "calls/s", LABELS, {how: values})
    finding = Finding(summary=f"{how} is <fast>", plots=[plot], tables=[Table(("n", "calls"), [("1", "a|b")], how)])
    return Result(step=how, state=State.PASSED, seconds=1.5, finding=finding)


FAILED = Result(step="bad", state=State.FAILED, reason="it broke", detail="Traceback <b>\n--- gateway.log")
SKIPPED = Result(step="none", state=State.SKIPPED, reason="no GPU: nothing here")


def whole(*results: Result) -> Report:
    about = {"cores": 2, "cpu": "a CPU", "memory_gib": 4, "kernel": "6", "python": "3.11"}
    return Report(
        date="2026-01-02", device="NVIDIA X", driver="580.1", pretended=False, machine=about, results=list(results)
    )


def test_all_three_files_are_written_and_the_json_is_complete(tmp_path: Path) -> None:
    told = whole(found("time", 10.0, 70.0), FAILED, SKIPPED)
    path = report.write(told, {"time": "In slices"}, tmp_path / "new")
    assert sorted(each.name for each in path.parent.iterdir()) == [
        f"gpu-check-2026-01-02.{ending}" for ending in ("html", "json", "md")
    ]
    read = msgspec.json.decode(path.read_bytes(), type=Report)
    assert (read.device, read.driver, [each.step for each in read.results]) == (
        "NVIDIA X",
        "580.1",
        ["time", "bad", "none"],
    )
    assert msgspec.to_builtins(read) == msgspec.json.decode(msgspec.json.encode(told))


def test_the_text_names_device_driver_and_each_step_with_its_reason() -> None:
    text = report.markdown(whole(found("time", 1.0, 2.0), FAILED, SKIPPED), {"time": "In slices"})
    assert "NVIDIA X; driver 580.1, 2 cores of a CPU" in text
    assert "| time | ok | 1.5 s | time is <fast> |" in text
    assert "| bad | FAILED | 0.0 s | it broke |" in text
    assert "| none | skipped | 0.0 s | no GPU: nothing here |" in text
    assert "## In slices" in text
    assert "a\\|b" in text  # the text must not end the cell
    assert "```text\nTraceback <b>\n--- gateway.log\n```" in text
    assert "## none" not in text  # its summary line is complete


def test_output_of_programs_is_shown_unchanged() -> None:
    heard = Result(
        step="words", state=State.PASSED, finding=Finding(summary="", said={"0: get_server_list": "12\n[exit code 0]"})
    )
    text = report.markdown(whole(heard), {"words": "Words"})
    assert "## Words\n\n`0: get_server_list`:\n\n```text\n12\n[exit code 0]\n```" in text
    assert "<pre>12\n[exit code 0]</pre>" in page.render(whole(heard), {}, [])


def test_plots_of_one_title_stand_in_one_picture() -> None:
    (plot,) = report.merged([found("time", 1.0, 2.0), SKIPPED, found("MPS", 3.0, None)])
    assert {how: list(values) for how, values in plot.series.items()} == {"time": [1.0, 2.0], "MPS": [3.0, None]}


def test_plots_with_other_labels_are_joined_with_gaps() -> None:
    def sized(name: str, label: str, milliseconds: float) -> Result:
        plot = Plot("Park", "ms", [label], {name: [milliseconds]})
        return Result(step=label, state=State.PASSED, finding=Finding(summary="", plots=[plot]))

    (plot,) = report.merged([sized("park", "1 GB", 40.0), sized("park", "10 GB", 400.0), sized("pin", "10 GB", 9.0)])
    assert plot.labels == ["1 GB", "10 GB"]
    assert plot.series == {"park": [40.0, 400.0], "pin": [None, 9.0]}


def test_the_page_has_no_external_files_and_escapes_texts() -> None:
    told = whole(found("time", 1.0, 2.0), found("MPS", 3.0, None), FAILED)
    html = page.render(told, {}, report.merged(told.results))
    assert html.count("<rect ") == 3  # a value that was not measured has no bar
    assert "time is &lt;fast&gt;" in html
    assert "Traceback &lt;b&gt;" in html
    assert not any(word in html for word in ("http://", "https://", "<script", "<link", "@import"))


@pytest.mark.parametrize("values", [(0.5, 900.0), (1e-3, 1e-3), (7.0, 7.1), (3.0, 100_000.0)])
def test_bars_stay_inside_the_picture(values: tuple[float, float]) -> None:
    told = whole(found("time", *values))
    html = page.render(told, {}, report.merged(told.results))
    bars = [tuple(map(float, found)) for found in re.findall(r'<rect [^>]* y="([\d.]+)"[^>]*height="([\d.]+)"', html)]
    assert len(bars) == 2
    assert all(top >= 12 and top + height <= 231 for top, height in bars)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([], 0),
        ([State.PASSED, State.SKIPPED], 0),
        ([State.PASSED, State.FAILED], 1),
        ([State.TIMED_OUT], 1),
    ],
)
def test_only_failures_end_it_with_an_error(states: list[State], code: int) -> None:
    assert report.exit_code(Result(step="x", state=state) for state in states) == code


def test_reports_with_figures_of_a_simulated_gpu_are_marked() -> None:
    told = whole(found("time", 1.0, 2.0))
    told.pretended = True
    assert "no figure counts" in report.markdown(told, {})
    assert "no figure counts" in page.render(told, {}, [])


def test_callers_together_have_their_calls_and_failures_over_the_whole_time() -> None:
    seen = CallStats.together([CallStats(2.0, [0.1, 0.3]), CallStats(2.1, [0.2], ["refused"])], 2.5)
    assert (seen.per_second, seen.quantile_ms(0.5), list(seen.failures)) == (1.2, 200.0, ["refused"])
    assert CallStats(1.0, []).quantile_ms(0.99) is None


def test_steps_have_names_of_their_own_and_the_whole_fits_a_lent_machines_command() -> None:
    names = [step.name for step in STEPS]
    assert len(set(names)) == len(names)
    assert TOTAL_S + 15 < 9 * 60
    assert all(step.limit_s < TOTAL_S for step in STEPS)


def gpu_check(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts" / "gpu-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_lists_its_steps_and_refuses_others() -> None:
    listed = gpu_check("--list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [step.name for step in STEPS]
    refused = gpu_check("--steps", "inventory,nonsense")
    assert (refused.returncode, refused.stdout) == (2, "unknown steps: nonsense; see --list\n")


def test_the_command_writes_a_report_of_unavailable_steps(tmp_path: Path) -> None:
    ended = gpu_check("--pretend", "--steps", "sharing-mps,overlap", "--out", tmp_path)
    if "a pretended GPU" not in ended.stdout:
        pytest.skip("this machine has a GPU, so none is pretended")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (path,) = tmp_path.glob("*.json")
    results = msgspec.json.decode(path.read_bytes(), type=Report).results
    assert [(each.step, each.line) for each in results] == [
        (name, "no GPU: it is only pretended") for name in ("sharing-mps", "overlap")
    ]
