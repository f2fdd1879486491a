"""`scripts/gpu-check`: the command line. Only the standard library is imported before it is known what is there."""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from pathlib import Path

from gpu_check import bundle, environment


def main() -> int:
    options = _options()
    if options.bundle:
        bundle.collect(options.bundle, options.python or bundle.PYTHONS)
        return 0
    if options.wheels:
        environment.restart_with(options.wheels, _without_wheels(sys.argv[1:]))
    if lacking := environment.missing():
        print(f"this Python lacks {', '.join(lacking)}: run scripts/install, or bring wheels (--bundle, --wheels)")
        return 1
    return _check(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description="What this machine's GPU can do under gpufn.")
    parser.add_argument("--steps", help="only these, with commas between them")
    parser.add_argument("--list", action="store_true", help="the steps and their limits")
    parser.add_argument("--out", type=Path, help="where the report is written; else benchmarks/results")
    parser.add_argument("--total", type=float, help="seconds that all of it may take")
    parser.add_argument("--pretend", action="store_true", help="try the check itself, with a GPU that is not there")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="use the wheels that --bundle collected")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="collect wheels for a machine without a network")
    parser.add_argument("--python", action="append", help="with --bundle: for this version; may be given again")
    return parser.parse_args()


def _without_wheels(arguments: list[str]) -> list[str]:
    """The same command for the Python that has them."""
    kept, words = [], iter(arguments)
    for word in words:
        if word == "--wheels":
            next(words)
        elif not word.startswith("--wheels="):
            kept.append(word)
    return kept


def _check(options: argparse.Namespace) -> int:
    import measure
    from gpu_check import machine, report
    from gpu_check.catalogue import STEPS, TOTAL_S
    from gpu_check.findings import Report
    from gpu_check.steps import run

    if options.list:
        for step in STEPS:
            print(f"{step.name:<18} {step.limit_s:4.0f} s  {step.title}")
        return 0
    names = options.steps.split(",") if options.steps else [step.name for step in STEPS]
    if unknown := set(names) - {step.name for step in STEPS}:
        print(f"no step is named {', '.join(sorted(unknown))}; see --list")
        return 2
    began = time.monotonic()
    found = machine.look(pretend=options.pretend)
    told = Report(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        device=found.gpus[0].name if found.gpus else f"no GPU ({found.why_no_gpu})",
        driver=found.driver,
        pretended=found.pretended,
        machine=found.about,
    )
    titles = {step.name: step.title for step in STEPS}
    folder = options.out or measure.RESULTS
    print(report.where(told), flush=True)
    chosen = [step for step in STEPS if step.name in names]
    with machine.awake():
        for result in run(chosen, found, total_s=options.total or TOTAL_S):
            told.results.append(result)
            told.seconds = time.monotonic() - began
            print(report.line(result, max(map(len, titles))), flush=True)
            written = report.write(told, titles, folder)  # after each: who is killed leaves what there was
    if left := report.left(told.results):
        print(f"\nleft for another command: --steps {','.join(left)}")
    print(f"\n{told.seconds:.0f} s; the report is {written}, .md and .html beside it")
    return report.exit_code(told.results)


if __name__ == "__main__":
    sys.exit(main())
