"""For `gpufn simulate`: a Question as JSON in, as the first argument; a Comparison as JSON out."""

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
    """`plot` is where the page goes, if it is wanted."""

    load: Load
    gpu: Gpu
    plot: str = ""


def main(asked: str) -> int:
    question = msgspec.json.decode(asked, type=Question)
    try:
        compared = compare(question.load, question.gpu)
    except InvalidInput as error:
        sys.stderr.write(f"{error.field}: {error.message}")
        return 2
    if question.plot:
        Path(question.plot).write_text(render(compared))
    sys.stdout.buffer.write(msgspec.json.encode(compared))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
