"""The steps of gpu-check, and the commands that run them."""

from __future__ import annotations

from gpu_check.catalogue import STEPS, TOTAL_S, commands
from tests.conftest import ROOT


def test_each_step_runs_alone_within_ten_minutes_and_within_its_command() -> None:
    assert max(step.limit_s for step in STEPS) <= TOTAL_S < 600
    named = [command.rpartition(" ")[2].split(",") for command in commands()]
    assert [name for group in named for name in group] == [step.name for step in STEPS]
    limits = {step.name: step.limit_s for step in STEPS}
    assert max(sum(map(limits.__getitem__, group)) for group in named) <= TOTAL_S


def test_the_readme_has_the_commands_in_order() -> None:
    assert "\n".join(commands()) in (ROOT / "benchmarks" / "README.md").read_text()
