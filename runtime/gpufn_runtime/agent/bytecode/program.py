"""Program that compiles files, for any Python of the node: it imports nothing but the standard library.

Standard input has the paths, with a null character between them. For each path in turn, standard output has the length
of its byte code in four bytes, and the byte code; 0 for a file that cannot be compiled.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import sys
import warnings

_UNCHECKED_HASH = 1  # PEP 552: Python does not compare the file with its source


def main() -> None:
    warnings.simplefilter("ignore")
    paths = sys.stdin.buffer.read().split(b"\0")
    for path in map(os.fsdecode, paths):
        try:
            data = byte_code(path)
        except Exception:
            data = b""  # an import reports it
        sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)
        sys.stdout.buffer.flush()  # a later file may end this process


def byte_code(path: str) -> bytes:
    with open(path, "rb") as file:
        source = file.read()
    code = compile(source, path, "exec", dont_inherit=True)
    flags = _UNCHECKED_HASH.to_bytes(4, "little")
    return importlib.util.MAGIC_NUMBER + flags + importlib.util.source_hash(source) + marshal.dumps(code)


if __name__ == "__main__":
    main()
