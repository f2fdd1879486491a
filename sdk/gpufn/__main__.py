"""Entry point of the command ``gpufn`` and of ``python -m gpufn``."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    try:
        from gpufn import cli  # noqa: PLC0415  inside `try`: this import takes most of the time of a quick command

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
