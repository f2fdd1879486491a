"""Options of a conversion in addition to the file, as the CLI passes them to the process. Pure."""

from __future__ import annotations

import msgspec


class ConvertOptions(msgspec.Struct, frozen=True):
    """`shapes` are typical shapes of the inputs. `samples` is a path, or "". `is_trusted` allows a file to run code."""

    shapes: dict[str, tuple[int, ...]] = {}
    samples: str = ""
    is_trusted: bool = False


def encode(options: ConvertOptions) -> str:
    return msgspec.json.encode(options).decode()


def decode(text: str) -> ConvertOptions:
    """
    >>> decode(encode(ConvertOptions({"x": (1, 4)}))).shapes
    {'x': (1, 4)}
    """
    return msgspec.json.decode(text, type=ConvertOptions)
