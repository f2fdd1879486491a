"""Command line of `scripts/gpu-check`. Imports only the standard library until missing packages are known."""

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
    if missing := environment.missing():
        print(f"this Python lacks {', '.join(missing)}: run scripts/install, or use wheels (--bundle, --wheels)")
        return 1
    return _check(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description="What this machine's GPU can do under gpufn.")
    parser.add_argument("--steps", help="run only these steps, separated by commas")
    parser.add_argument("--list", action="store_true", help="list the steps and their time limits")
    parser.add_argument("--out", type=Path, help="folder for the report; default: benchmarks/results")
    parser.add_argument("--total", type=float, help="time limit of all steps together, in seconds")
    parser.add_argument("--pretend", action="store_true", help="test the check itself with a simulated GPU")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="use the wheels that --bundle collected")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="collect wheels for a machine without a network")
    parser.add_argument("--python", action="append", help="with --bundle: a Python version; may be repeated")
    return parser.parse_args()


def _without_wheels(arguments: list[str]) -> list[str]:
    """Return the arguments without --wheels, for the Python that has the packages."""
    remaining, words = [], iter(arguments)
    for word in words:
        if word == "--wheels":
            next(words)
        elif not word.startswith("--wheels="):
            remaining.append(word)
    return remaining


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
        print(f"unknown steps: {', '.join(sorted(unknown))}; see --list")
        return 2
    started = time.monotonic()
    inspected = machine.inspect(pretend=options.pretend)
    check_report = Report(
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        device=inspected.gpus[0].name if inspected.gpus else f"no GPU ({inspected.why_no_gpu})",
        driver=inspected.driver,
        pretended=inspected.pretended,
        machine=inspected.about,
    )
    titles = {step.name: step.title for step in STEPS}
    folder = options.out or measure.RESULTS
    print(report.where(check_report), flush=True)
    chosen = [step for step in STEPS if step.name in names]
    with machine.keep_awake():
        for result in run(chosen, inspected, total_s=options.total or TOTAL_S):
            check_report.results.append(result)
            check_report.seconds = time.monotonic() - started
            print(report.line(result, max(map(len, titles))), flush=True)
            written = report.write(check_report, titles, folder)  # after each step: a killed check leaves a report
    if remaining := report.remaining(check_report.results):
        print(f"\nremaining steps: --steps {','.join(remaining)}")
    print(f"\n{check_report.seconds:.0f} s; report: {written}, with .md and .html beside it")
    return report.exit_code(check_report.results)


if __name__ == "__main__":
    sys.exit(main())
