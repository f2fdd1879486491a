"""``python -m gpufn`` is the command ``gpufn``."""

from gpufn.cli import main

if __name__ == "__main__":
    main()
