"""Process of `gpufn simulate`: reads a Question as JSON from its argument, writes a Comparison as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from gpufn_core.errors import InvalidInput
from gpufn_local.simulation.gpu import Gpu
from gpufn_local.simulation.page import render
from gpufn_local.simulation.run import compare
from gpufn_local.simulation.traces import Load


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`plot` is the path of the HTML page; empty for none."""

    load: Load
    gpu: Gpu
    plot: str = ""


def main(argument: str) -> int:
    question = msgspec.json.decode(argument, type=Question)
    try:
        comparison = compare(question.load, question.gpu)
    except InvalidInput as error:
        sys.stderr.write(f"{error.field}: {error.message}")
        return 2
    if question.plot:
        Path(question.plot).write_text(render(comparison))
    sys.stdout.buffer.write(msgspec.json.encode(comparison))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
