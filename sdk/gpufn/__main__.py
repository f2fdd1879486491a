"""The command ``gpufn``, which is also ``python -m gpufn``."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    try:
        from gpufn import cli  # noqa: PLC0415  (most of the time that a quick command takes)

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
