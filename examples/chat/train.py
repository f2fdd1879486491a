"""Train the model on Markdown files, and write model.json: python train.py FILE..."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from language import trained

# Code, tables, headings and the addresses of links are no sentences.
_NOISE = re.compile(r"```.*?```|^[|#].*?$|\]\([^)]*\)|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def main(*paths: str) -> None:
    if not paths:
        raise SystemExit(__doc__)
    text = "\n\n".join(_NOISE.sub(" ", Path(path).read_text()) for path in paths)
    model = trained(re.sub(r"[\s.:]*\n\s*\n", ". ", text))  # a paragraph ends a sentence
    path = Path(__file__).parent / "model.json"
    path.write_bytes(msgspec.json.encode(model))
    print(f"wrote {path.name}, {path.stat().st_size:,} bytes, from {len(paths)} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
