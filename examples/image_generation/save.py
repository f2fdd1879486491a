"""Paint a picture and save its previews: python save.py "a blue ring" [FOLDER]"""

from __future__ import annotations

import sys
from pathlib import Path

from gpufn import Function


def main(prompt: str, folder: str = ".") -> None:
    for preview in Function.from_name("painter.paint").stream(prompt=prompt):
        path = Path(folder) / f"{preview['step']:03}.png"
        path.write_bytes(preview["png"])
        print(f"step {preview['step']:3} of {preview['steps']}  {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
