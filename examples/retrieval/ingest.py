"""Put the Markdown files of a folder into the index: python ingest.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

from gpufn import Function


def main(folder: str) -> None:
    paths = sorted(Path(folder).glob("*.md"))
    documents = [(path.stem, path.read_text()) for path in paths]
    passages = sum(Function.from_name("add").starmap(documents, ordered=False, progress=True))
    print(f"{passages} passages of {len(paths)} documents")


if __name__ == "__main__":
    main(*sys.argv[1:])
